(function () {
  "use strict";
  // Figures are drawn already. This tells the values of their curves below the pointer.
  var specs = JSON.parse(document.getElementById("specs").textContent);
  var note = document.createElement("div");
  note.className = "hover";
  note.hidden = true;
  document.body.appendChild(note);

  // The index of the value next to `x` that has a value on the other axis, too.
  function nearest(trace, x) {
    var best = -1;
    trace.x.forEach(function (value, i) {
      if (trace.y[i] !== null && (best < 0 || Math.abs(value - x) < Math.abs(trace.x[best] - x))) best = i;
    });
    return best;
  }

  Object.keys(specs).forEach(function (id) {
    var canvas = document.getElementById(id);
    var curves = specs[id].traces.filter(function (trace) {
      return trace.kind.indexOf("line") === 0 && !trace.dotted;
    });
    if (!canvas || !curves.length) return;
    canvas.querySelectorAll("svg").forEach(function (svg) {
      var area = JSON.parse(svg.getAttribute("data-area"));
      svg.addEventListener("pointermove", function (event) {
        var box = svg.getBoundingClientRect();
        var place = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
        var part = (place - area.left) / (area.right - area.left);
        if (part < 0 || part > 1) { note.hidden = true; return; }
        var x = area.x[0] + part * (area.x[1] - area.x[0]);
        if (area.x[2]) x = Math.pow(10, x);
        var lines = [], at = null;
        curves.forEach(function (trace) {
          var i = nearest(trace, x);
          if (i < 0) return;
          if (at === null) at = trace.x[i];
          var value = trace.text.length ? trace.text[i] : trace.name + ": " + Number(trace.y[i].toPrecision(4));
          lines.push(value);
        });
        if (!lines.length) return;
        note.textContent = Math.round(at).toLocaleString("en") + "\n" + lines.join("\n");
        note.hidden = false;
        note.style.left = Math.min(event.clientX + 14, window.innerWidth - note.offsetWidth - 8) + "px";
        note.style.top = event.clientY + 14 + "px";
      });
      svg.addEventListener("pointerleave", function () { note.hidden = true; });
    });
  });
})();
