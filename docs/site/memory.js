// The memory page: the fastest plan in a budget, out of those that
// benchmarks/memory_grid/run.py made beforehand.
(() => {
  const grid = window.anybatchGrid;
  const root = document.getElementById("memory-planner");
  const isChinese = document.documentElement.lang.startsWith("zh");
  const say = (english, chinese) => (isChinese ? chinese : english);
  const names = Object.keys(grid.rows).map((name) => name.split(" "));
  const controls = [
    [say("Model", "模型"), (value) => grid.models[value]],
    [say("Tokens", "token 数"), (value) => (value === "0" ? "–" : value)],
    [say("Adapter", "适配器"), (value) => (value === "0" ? say("none", "无") : `LoRA, rank ${value}`)],
    [say("Precision", "精度"), (value) => value],
  ];
  const chosen = ["gpt2", "1024", "0", "fp32"];
  let size = "10GiB";
  let batch = 256;

  const element = (tag, text, attributes = {}) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.textContent = text ?? "";
    return made;
  };
  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (count >= 1024 && power < 4) {
      count /= 1024;
      power += 1;
    }
    return `${Number(count.toPrecision(3))} ${units[power]}`;
  };
  // The values of a control that go with those chosen before it.
  const values = (index) => {
    const fitting = names.filter((name) => name.slice(0, index).every((it, i) => it === chosen[i]));
    return [...new Set(fitting.map((name) => name[index]))];
  };

  const form = element("form");
  const output = element("div");
  output.setAttribute("aria-live", "polite");
  form.addEventListener("submit", (event) => event.preventDefault());
  root.append(form, output);

  function drawForm() {
    form.replaceChildren();
    controls.forEach(([title, nameOf], index) => {
      const possible = values(index);
      if (!possible.includes(chosen[index])) chosen[index] = possible[0];
      const select = element("select", "", {
        onchange: () => {
          chosen[index] = select.value;
          draw();
        },
      });
      for (const value of possible) {
        select.append(element("option", nameOf(value), { value, selected: value === chosen[index] }));
      }
      const label = element("label", title);
      label.append(select);
      form.append(label);
    });
    const sizes = element("select", "", {
      onchange: () => {
        size = sizes.value;
        drawRow();
      },
    });
    for (const value of Object.keys(grid.budgets)) {
      sizes.append(element("option", value.replace("GiB", " GiB"), { value, selected: value === size }));
    }
    const number = element("input", "", { type: "number", min: 1, step: 1, value: batch });
    number.oninput = () => {
      if (number.value >= 1) {
        batch = Math.round(number.value);
        drawRow();
      }
    };
    for (const [title, control] of [
      [say("Memory of the card", "显卡的显存"), sizes],
      [say("Global batch", "全局批量"), number],
    ]) {
      const label = element("label", title);
      label.append(control);
      form.append(label);
    }
  }

  const chinese = [
    [/micro-batch (\d+)/, "微批量 $1"],
    [/recompute none/, "不重计算"],
    [/recompute (\d+) blocks?/, "重计算 $1 个块"],
    [/recompute all/, "重计算每个块"],
    [/matrix products kept/, "保留矩阵乘积"],
    [/optimizer states in host memory/, "优化器状态放在内存"],
    [/kept in host memory/, "激活值放在内存"],
    [/loss in chunks/, "分块计算损失"],
  ];
  const inWords = (words) =>
    isChinese ? chinese.reduce((text, [from, to]) => text.replace(from, to), words) : words;

  // The fastest point of a row that fits; points are (bytes, seconds, micro-batch, words).
  function best(row) {
    const fitting = row.filter(([peak]) => peak <= grid.budgets[size]);
    return fitting.reduce((a, b) => (a && a[1] <= b[1] ? a : b), null);
  }

  function table(heads, rows, marked) {
    const made = element("table");
    const head = element("tr");
    head.append(...heads.map((text) => element("th", text)));
    made.createTHead().append(head);
    const body = made.createTBody();
    rows.forEach((cells, index) => {
      const row = element("tr", "", { className: index === marked ? "memory-plan" : "" });
      row.append(...cells.map((text) => element("td", text)));
      body.append(row);
    });
    const frame = element("div", "", { className: "memory-table" });
    frame.append(made);
    return frame;
  }

  // Points that are a quarter larger than the one before, the plan among them.
  function apart(row, point) {
    const shown = [];
    for (const it of row) {
      const last = shown[shown.length - 1];
      if (!last || it[0] >= 1.25 * last[0]) shown.push(it);
      else if (it === point) shown.splice(-1, 1, it);
    }
    return shown;
  }

  // Rows that differ from the one that is chosen in one control.
  function changes() {
    const found = names.filter((name) => name.filter((it, i) => it !== chosen[i]).length === 1);
    return found
      .filter((name) => name[0] === chosen[0])
      .map((name) => {
        const index = name.findIndex((it, i) => it !== chosen[i]);
        const row = grid.rows[name.join(" ")];
        const point = best(row);
        return [
          `${controls[index][0]}: ${controls[index][1](name[index])}`,
          point ? String(Math.min(point[2], batch)) : say("none fits", "放不下"),
          point ? bytes(point[0]) : "–",
          bytes(row[0][0]),
        ];
      });
  }

  function command() {
    const text =
      `anybatch memory ${grid.commands[chosen.join(" ")]} --global-batch ${batch}` +
      ` --precision ${chosen[3]} --device ${size}`;
    const made = element("div", "", { className: "memory-command" });
    const button = element("button", say("Copy as command", "复制为命令"), { className: "md-button" });
    button.onclick = async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = say("Copied", "已复制");
    };
    made.append(element("code", text), button);
    return made;
  }

  function drawRow() {
    const row = grid.rows[chosen.join(" ")];
    const point = best(row);
    const parts = [];
    const budget = grid.budgets[size];
    if (point) {
      const [peak, , most, words] = point;
      const micro = Math.min(most, batch);
      const pieces = Math.ceil(batch / micro);
      const fits = element("p", "", { className: "memory-fits" });
      fits.append(element("strong", `${say("Fits", "放得下")}: ${bytes(peak)} / ${bytes(budget)}`));
      const bar = element("div", "", { className: "memory-bar" });
      const used = element("span");
      used.style.width = `${(100 * peak) / budget}%`;
      bar.append(used);
      const plan = say(
        `Plan: ${inWords(words)}. ${batch} samples per update run in ${pieces} micro-batches of up to ${micro}.`,
        `方案：${inWords(words)}。每次更新 ${batch} 个样本，分 ${pieces} 个微批量，每个至多 ${micro} 个样本。`,
      );
      parts.push(fits, bar, element("p", plan));
    } else {
      const needed = `${bytes(row[0][0])} > ${bytes(budget)}`;
      const verdict = say("Does not fit, at the leanest plan", "最省显存的方案也放不下");
      const short = element("p", "", { className: "memory-short" });
      short.append(element("strong", `${verdict}: ${needed}`));
      parts.push(short);
    }
    const one = changes();
    if (one.length) {
      const heads = [
        say("One change", "单项改动"),
        say("Micro-batch that fits", "放得下的微批量"),
        say("Peak", "峰值"),
        say("Leanest plan", "最省显存的方案"),
      ];
      parts.push(element("h3", say("What a change buys", "改一项换来什么")), table(heads, one, -1));
    }
    parts.push(command());
    const fastest = point ? point[1] : row[row.length - 1][1];
    const shown = apart(row, point);
    parts.push(
      element("h3", say("What memory buys", "多给显存换来什么")),
      table(
        [say("Peak", "峰值"), say("Time", "时间"), say("Plan", "方案")],
        shown.map(([peak, seconds, , words]) => [
          bytes(peak),
          `${(seconds / fastest).toFixed(2)} ×`,
          inWords(words),
        ]),
        shown.indexOf(point),
      ),
    );
    output.replaceChildren(...parts);
  }

  function draw() {
    drawForm();
    drawRow();
  }

  draw();
})();
