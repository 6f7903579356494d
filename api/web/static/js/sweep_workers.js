// Who worked when: a bar an attempt, a row a worker.
import { axis, draw, empty, figures, legend, tooltip } from "./charts.js";
import { secondsText, words } from "./units.js";

const TONES = { succeeded: "good", pruned: "warn", infeasible: "warn", failed: "bad", lost: "bad" };
const UNITS = [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3]];

export function drawWorkers(id, attempts, trials) {
  const panel = document.getElementById("workers");
  const target = panel.querySelector(".chart");
  const shown = new Set(trials.map((trial) => trial.id));
  const kept = attempts.filter((attempt) => shown.has(attempt.trial_id) && attempt.claimed_at);
  const first = kept.reduce((least, attempt) => Math.min(least, Date.parse(attempt.claimed_at)), Infinity);
  const rows = kept.map((attempt) => {
    const begin = (Date.parse(attempt.claimed_at) - first) / 1000;
    const end = attempt.finished_at ? (Date.parse(attempt.finished_at) - first) / 1000 : Math.max(begin, (Date.now() - first) / 1000);
    return { worker: attempt.worker, number: attempt.trial_number, outcome: attempt.outcome || "running", begin, end, took: end - begin };
  });
  figures(panel, `${id}-workers`, [["worker", "Worker"], ["number", "Trial"], ["outcome", "Outcome"], ["begin", "Begin", secondsText], ["end", "End", secondsText], ["took", "Took", secondsText]], rows);
  if (!rows.length) { empty(target, "Nobody has worked on the trials that match the filters."); return; }
  const workers = [...new Set(rows.map((row) => row.worker))].sort().reverse();
  const longest = rows.reduce((most, row) => Math.max(most, row.end), 1e-3);
  const [unit, size] = UNITS.find(([, seconds]) => longest >= seconds) || UNITS[UNITS.length - 1];
  const outcomes = [...new Set(rows.map((row) => row.outcome))].sort();
  const height = Math.min(26, Math.max(4, 140 / workers.length));
  draw(target, (colour) => ({
    legend: legend(colour), grid: { left: 150, right: 24, top: 40, bottom: 46 },
    tooltip: tooltip(colour, { formatter: ({ data }) => (data?.row ? `Trial ${data.row.number} · ${words(data.row.outcome)}\n${data.row.worker}\ntook ${secondsText(data.row.took)}` : "") }),
    xAxis: axis(`since the first claim (${unit})`, colour, { type: "value", min: 0 }),
    yAxis: axis("", colour, { type: "category", data: workers, splitLine: { show: false }, axisLabel: { color: colour.text, fontSize: 11, width: 136, overflow: "truncate" } }),
    series: outcomes.map((outcome) => {
      const own = rows.filter((row) => row.outcome === outcome);
      const color = outcome === "running" ? colour.accent : colour[TONES[outcome]] || colour.series[8];
      return {
        name: words(outcome), type: "line", symbol: "rect", symbolSize: [3, height], connectNulls: false, cursor: "default", itemStyle: { color },
        lineStyle: { color, width: height, opacity: 0.55, cap: "butt" },
        data: own.flatMap((row) => [{ value: [row.begin / size, row.worker], row }, { value: [row.end / size, row.worker], row }, { value: [row.end / size, "-"] }]),
      };
    }),
  }));
}
