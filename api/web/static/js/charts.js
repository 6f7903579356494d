// One way to draw: colours from the stylesheet, tooltips on the canvas (the CSP forbids inline styles),
// and under each chart the same figures as a table and as CSV.
const drawn = new Map();

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    series: Array.from({ length: 12 }, (_, index) => read(`--c${index}`)),
    text: read("--text"), muted: read("--muted"), line: read("--line"), strong: read("--line-strong"),
    panel: read("--panel"), accent: read("--accent"), good: read("--good"), warn: read("--warn"), bad: read("--bad"),
    font: read("--sans"),
  };
}

export function axis(name, colour, extra = {}) {
  return {
    name, nameLocation: "middle", nameGap: 30, nameTextStyle: { color: colour.muted, fontSize: 12 },
    axisLine: { show: true, lineStyle: { color: colour.strong } }, axisTick: { show: false },
    axisLabel: { color: colour.muted, fontSize: 11, hideOverlap: true },
    splitLine: { lineStyle: { color: colour.line } }, ...extra,
  };
}

export function tooltip(colour, extra = {}) {
  return {
    renderMode: "richText", confine: true, backgroundColor: colour.panel, borderColor: colour.strong,
    borderWidth: 1, padding: 9, textStyle: { color: colour.text, fontSize: 12, lineHeight: 17 }, ...extra,
  };
}

export function legend(colour, extra = {}) {
  return {
    type: "scroll", top: 0, left: 0, itemWidth: 12, itemHeight: 9, itemGap: 14, icon: "roundRect",
    pageIconColor: colour.muted, pageTextStyle: { color: colour.muted },
    textStyle: { color: colour.muted, fontSize: 12, lineHeight: 18 }, ...extra,
  };
}

// Draws `option(colours)` into `element`, again whenever the theme or the size changes.
export function draw(element, option) {
  let entry = drawn.get(element);
  if (!entry) {
    element.replaceChildren();
    const chart = window.echarts.init(element, null, { renderer: "canvas" });
    entry = { chart, option };
    drawn.set(element, entry);
    new ResizeObserver(() => chart.resize()).observe(element);
  }
  entry.option = option;
  render(entry);
  return entry.chart;
}

function render({ chart, option }) {
  const colour = colours();
  chart.setOption(
    { animation: false, backgroundColor: "transparent", textStyle: { fontFamily: colour.font }, ...option(colour) },
    { notMerge: true },
  );
}

export function empty(element, text) {
  const entry = drawn.get(element);
  if (entry) { entry.chart.dispose(); drawn.delete(element); }
  const note = document.createElement("p");
  note.className = "chart-empty";
  note.textContent = text;
  element.replaceChildren(note);
}

const redraw = () => drawn.forEach(render);
document.addEventListener("flatpeak:theme", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

const quoted = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

// The chart's figures under it: `columns` are [key, title, format?], `rows` are objects.
export function figures(panel, name, columns, rows) {
  const details = panel.querySelector("details.data");
  if (details) {
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const [, title, format] of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      if (format) cell.className = "num";
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows.slice(0, 500)) {
      const line = body.insertRow();
      for (const [key, , format] of columns) {
        const cell = line.insertCell();
        cell.textContent = format ? format(row[key]) : row[key] ?? "–";
        if (format) cell.className = "num";
      }
    }
    details.querySelector(".table-wrap").replaceChildren(table);
    details.querySelector("summary").textContent =
      rows.length > 500 ? `Table (first 500 of ${rows.length} rows; the CSV has all)` : `Table (${rows.length} rows)`;
  }
  const link = panel.querySelector("a.csv");
  if (link) {
    const lines = [columns.map(([key]) => quoted(key)), ...rows.map((row) => columns.map(([key]) => quoted(row[key])))];
    if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(new Blob([lines.map((line) => line.join(",")).join("\n") + "\n"], { type: "text/csv" }));
    link.download = `${name}.csv`;
  }
}
