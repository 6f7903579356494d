// A plan: memory stacked against the card, the step's time term by term.
import { call, showProblem } from "./api.js";
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { byteAxis, bytesText, secondAxis, secondsText, words } from "./units.js";

const id = document.getElementById("result").dataset.id;

function provenance(plan, pointer) {
  const entry = (plan.provenance || {})[pointer];
  return entry ? entry.provenance : "";
}

function drawMemory(plan) {
  const panel = document.getElementById("memory");
  const target = panel.querySelector(".chart");
  const { memory } = plan;
  const outside = memory.terms.outside_allocator || 0;
  const slack = memory.terms.allocator_slack || 0;
  // Top to bottom: the binding live set with what surrounds it, then every phase, then the closed form.
  const phases = Object.entries(memory.phases || {}).map(([name, live]) => [words(name), live]);
  const peak = phases.length ? phases.reduce((best, phase) => (sum(phase[1]) > sum(best[1]) ? phase : best)) : null;
  const bars = [
    ["closed form (sum)", memory.terms],
    ...phases.reverse(),
    ...(peak ? [["footprint", { ...peak[1], outside_allocator: outside, allocator_slack: slack }]] : []),
  ];
  const names = Object.keys(memory.terms).filter((name) => bars.some(([, live]) => live[name] > 0));
  figures(panel, `${id}-memory`, [["bar", "Live set"], ["term", "Term"], ["bytes", "Bytes", bytesText], ["provenance", "Provenance"]],
    bars.flatMap(([bar, live]) => names.filter((name) => live[name] > 0).map((name) => ({ bar, term: words(name), bytes: live[name], provenance: bar === "closed form (sum)" ? provenance(plan, `/memory/terms/${name}`) : "" }))).reverse());
  const { unit, size } = byteAxis(Math.max(memory.hbm_bytes, ...bars.map(([, live]) => sum(live))));
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 142, right: 44, top: 58, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ data, seriesName, name }) => (data?.bytes ? `${name}\n${seriesName}: ${bytesText(data.bytes)}\nwhole bar: ${bytesText(data.whole)}` : "") }),
    xAxis: axis(`bytes of one GPU (${unit})`, colour, { type: "value", min: 0 }),
    yAxis: axis("", colour, { type: "category", data: bars.map(([name]) => name), splitLine: { show: false }, axisLabel: { color: colour.text, fontSize: 12 } }),
    series: names.map((name, index) => ({
      name: words(name), type: "bar", stack: "all", barMaxWidth: 26, itemStyle: { color: colour.series[index % 12] },
      data: bars.map(([, live]) => ({ value: (live[name] || 0) / size, bytes: live[name] || 0, whole: sum(live) })),
      markLine: index === 0 ? { silent: true, symbol: "none", lineStyle: { color: colour.bad, type: "dashed", width: 1.5 }, label: { formatter: `HBM ${bytesText(memory.hbm_bytes)}`, color: colour.bad, position: "end", rotate: 0 }, data: [{ xAxis: memory.hbm_bytes / size }] } : undefined,
    })),
  }));
}

const sum = (live) => Object.values(live).reduce((total, bytes) => total + bytes, 0);

function drawStep(plan) {
  const panel = document.getElementById("step");
  const target = panel.querySelector(".chart");
  const terms = Object.entries(plan.step_time.terms).filter(([, value]) => value > 0).sort((a, b) => a[1] - b[1]);
  const rows = terms.map(([name, seconds]) => {
    const entry = (plan.provenance || {})[`/step_time/terms/${name}`] || {};
    return { term: words(name), seconds, low: entry.low ?? null, high: entry.high ?? null, provenance: entry.provenance || "" };
  });
  figures(panel, `${id}-step`, [["term", "Term"], ["seconds", "Seconds", secondsText], ["low", "Low", secondsText], ["high", "High", secondsText], ["provenance", "Provenance"]], [...rows].reverse());
  if (!rows.length) { empty(target, "The plan has no step time."); return; }
  const { unit, size } = secondAxis(Math.max(...rows.map((row) => row.high ?? row.seconds)));
  draw(target, (colour) => ({
    grid: { left: 150, right: 72, top: 12, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ data }) => (data?.row ? `${data.row.term}\n${secondsText(data.row.seconds)}${data.row.low !== null ? ` (${secondsText(data.row.low)} to ${secondsText(data.row.high)})` : ""}\n${data.row.provenance}` : "") }),
    xAxis: axis(`seconds of a step (${unit})`, colour, { type: "value", min: 0 }),
    yAxis: axis("", colour, { type: "category", data: rows.map((row) => row.term), splitLine: { show: false }, axisLabel: { color: colour.text, fontSize: 12 } }),
    series: [
      { type: "bar", barMaxWidth: 20, itemStyle: { color: colour.series[0] }, data: rows.map((row) => ({ value: row.seconds / size, row })), },
      // The label stands behind the interval, and so that the interval stays inside the axes.
      { type: "scatter", symbolSize: 0, silent: true, data: rows.map((row, index) => ({ value: [(row.high ?? row.seconds) / size, index], row })), label: { show: true, position: "right", color: colour.muted, fontSize: 11, formatter: ({ data }) => secondsText(data.row.seconds) } },
      ...(rows.some((row) => row.low !== null) ? [{
        type: "line", symbol: "none", silent: true, lineStyle: { opacity: 0 }, data: [],
        markLine: { silent: true, symbol: "none", lineStyle: { color: colour.muted, width: 1.2, type: "solid" }, label: { show: false }, data: rows.map((row, index) => [{ coord: [row.low / size, index] }, { coord: [row.high / size, index] }]) },
      }] : []),
    ],
  }));
}

document.getElementById("copy")?.addEventListener("click", async (event) => {
  const text = document.getElementById("launch-json").textContent;
  try {
    await navigator.clipboard.writeText(text);
    event.target.textContent = "Copied";
  } catch {
    event.target.textContent = "Select the text below";
  }
});

try {
  const plan = await call(`/v1/plans/${id}`);
  if (plan.memory) drawMemory(plan);
  if (plan.step_time) drawStep(plan);
} catch (error) {
  showProblem(document.getElementById("problem"), error);
}
