"use strict";
// Shows the value nearest to the pointer, the finger or the keyboard's choice. Text only: nothing is parsed as markup.
(function () {
  function shown(value) {
    var size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 10000) return Math.round(value).toLocaleString("en-US");
    if (size < 0.0001) return value.toExponential(2);
    return String(Number(value.toPrecision(5)));
  }

  function titleOf(element) {
    var title = element.querySelector(":scope > title");
    return title ? title.textContent : "";
  }

  // Every point of a chart as place in the picture and text, one list for each series.
  function collect(chart) {
    var unit = chart.dataset.x || "", lists = [];
    chart.querySelectorAll("g.plot").forEach(function (plot) {
      var m = plot.getAttribute("transform").match(/-?[\d.]+(?:e[-+]?\d+)?/g).map(Number);
      var left = Number(plot.parentNode.getAttribute("x")), top = Number(plot.parentNode.getAttribute("y"));
      var height = Number(plot.parentNode.getAttribute("height"));
      plot.querySelectorAll("g.line").forEach(function (group) {
        var name = titleOf(group), list = [];
        group.querySelectorAll("polyline").forEach(function (line) {
          line.getAttribute("points").trim().split(/\s+/).forEach(function (pair) {
            var xy = pair.split(",").map(Number);
            var place = unit === "step" ? "step " + shown(xy[0]) : shown(xy[0]) + " " + unit;
            var y = m[3] * xy[1] + m[5];
            if (y >= -1 && y <= height + 1) {
              list.push({ x: left + m[0] * xy[0] + m[4], y: top + y, text: name + ": " + shown(xy[1]) + " at " + place });
            }
          });
        });
        if (list.length) lists.push(list);
      });
    });
    var marks = [];
    chart.querySelectorAll(".p").forEach(function (mark) {
      var box = mark.getBBox();
      marks.push({ x: box.x + box.width / 2, y: box.y + box.height / 2, text: titleOf(mark), box: box });
    });
    if (marks.length) lists.push(marks);
    return lists;
  }

  function distance(point, x, y) {
    var box = point.box;
    if (box && x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height) return 0;
    // Along x people aim, along y they wander.
    return Math.hypot(point.x - x, (point.y - y) * 0.6);
  }

  document.querySelectorAll("svg.chart").forEach(function (chart) {
    var lists = null, at = { list: 0, item: 0 }, canvas = chart.parentNode;
    var readout = document.createElement("output"), halo = null;
    readout.className = "readout";
    readout.setAttribute("aria-live", "polite");
    readout.hidden = true;
    canvas.appendChild(readout);

    function ready() {
      if (!lists) lists = collect(chart);
      return lists.length > 0;
    }

    function show(list, item) {
      var point = lists[list][item], matrix = chart.getScreenCTM(), frame = canvas.getBoundingClientRect();
      at = { list: list, item: item };
      if (!halo) {
        halo = document.createElementNS("http://www.w3.org/2000/svg", "circle");
        halo.setAttribute("class", "halo");
        halo.setAttribute("r", "6");
        chart.appendChild(halo);
      }
      halo.setAttribute("cx", point.x);
      halo.setAttribute("cy", point.y);
      halo.removeAttribute("visibility");
      readout.textContent = point.text;
      readout.hidden = false;
      var x = matrix.a * point.x + matrix.e - frame.left, y = matrix.d * point.y + matrix.f - frame.top;
      var left = Math.max(0, Math.min(frame.width - readout.offsetWidth, x - readout.offsetWidth / 2));
      var top = y - readout.offsetHeight - 12;
      readout.style.left = left + "px";
      readout.style.top = (top < 0 ? y + 14 : top) + "px";
    }

    function hide() {
      readout.hidden = true;
      if (halo) halo.setAttribute("visibility", "hidden");
    }

    function point(event) {
      if (!ready()) return;
      var matrix = chart.getScreenCTM(), best = null, least = Infinity;
      var x = (event.clientX - matrix.e) / matrix.a, y = (event.clientY - matrix.f) / matrix.d;
      lists.forEach(function (list, i) {
        list.forEach(function (candidate, j) {
          var away = distance(candidate, x, y);
          if (away < least) { least = away; best = [i, j]; }
        });
      });
      if (best) show(best[0], best[1]);
    }

    function press(event) {
      var moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Escape") return hide();
      if (!moves[event.key] || !ready()) return;
      event.preventDefault();
      var list = (at.list + moves[event.key][0] + lists.length) % lists.length;
      var item = at.item + moves[event.key][1];
      if (list !== at.list) item = Math.round(at.item / lists[at.list].length * lists[list].length);
      show(list, Math.max(0, Math.min(lists[list].length - 1, item)));
    }

    chart.addEventListener("pointermove", point);
    chart.addEventListener("pointerdown", point);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("keydown", press);
    chart.addEventListener("focus", function () {
      if (chart.matches(":focus-visible") && ready()) show(at.list, Math.min(at.item, lists[at.list].length - 1));
    });
    chart.addEventListener("blur", hide);
  });
})();
