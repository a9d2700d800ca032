(function () {
  "use strict";
  var specs = JSON.parse(document.getElementById("specs").textContent);
  var config = { displayModeBar: false, displaylogo: false, responsive: true, scrollZoom: false };

  // Puts the theme's colours in the place of their names.
  function themed(value, key, style) {
    if (Array.isArray(value)) return value.map(function (item) { return themed(item, key, style); });
    if (value && typeof value === "object") {
      var copy = {};
      Object.keys(value).forEach(function (k) { copy[k] = themed(value[k], k, style); });
      return copy;
    }
    return /color$/.test(key) && /^--[a-z0-9-]+$/.test(value) ? style.getPropertyValue(value).trim() : value;
  }

  function axis(own, style) {
    var ink = style.getPropertyValue("--ink-2").trim(), grid = style.getPropertyValue("--grid").trim();
    return Object.assign({
      automargin: true, gridcolor: grid, zeroline: false, linecolor: grid, fixedrange: true,
      tickfont: { size: 12, color: ink }
    }, own, own && own.title ? { title: Object.assign({ standoff: 8, font: { size: 13, color: ink } }, own.title) } : {});
  }

  function draw() {
    var style = getComputedStyle(document.documentElement);
    var ink = style.getPropertyValue("--ink").trim(), card = style.getPropertyValue("--card").trim();
    Object.keys(specs).forEach(function (id) {
      var spec = themed(specs[id], "", style), own = spec.layout;
      var layout = Object.assign({
        margin: { l: 8, r: 12, t: own.annotations && own.annotations.length ? 34 : 14, b: 8 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
        hoverlabel: { bgcolor: card, bordercolor: style.getPropertyValue("--line").trim(), align: "left",
          font: { color: ink, size: 13 } },
        showlegend: spec.data.length > 1,
        legend: { orientation: "h", x: 0, xanchor: "left", y: -0.24, yanchor: "top" }
      }, own, { xaxis: axis(own.xaxis, style), yaxis: axis(own.yaxis, style) });
      Plotly.react(id, spec.data, layout, config);
    });
  }

  draw();
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  if (dark.addEventListener) dark.addEventListener("change", draw);
})();
