// One sweep, live: its charts, its trials, and one set of filters for all of them.
import { all, call, showProblem } from "./api.js";
import { drawImportance, drawKnobs, drawLines, knobsOf } from "./sweep_knobs.js";
import { drawPareto } from "./sweep_pareto.js";
import { drawWorkers } from "./sweep_workers.js";

const root = document.getElementById("sweep");
const address = `/v1/sweeps/${root.dataset.id}`;
const form = document.getElementById("filters");
const data = { sweep: null, trials: [], samples: [], attempts: [] };
const others = new Map();

function filters() {
  const chosen = new FormData(form);
  const knobs = {};
  for (const [name, value] of chosen) if (name.startsWith("knob.") && value !== "") knobs[name.slice(5)] = value;
  return { states: new Set(chosen.getAll("state")), knobs, pass: chosen.get("pass") || "", compare: chosen.get("compare") || "" };
}

function visible(trial, { states, knobs }) {
  if (states.size && !states.has(trial.state)) return false;
  return Object.entries(knobs).every(([name, value]) => String(trial.config[name]) === value);
}

// The sweep to compare with: its trials are fetched once, and the same filters hold for them.
async function beside(chosen) {
  if (!chosen.compare) return null;
  if (!others.has(chosen.compare)) others.set(chosen.compare, await all(`/v1/sweeps/${encodeURIComponent(chosen.compare)}/trials?limit=500`));
  const name = form.elements.compare.selectedOptions[0]?.textContent || chosen.compare;
  return { name, trials: others.get(chosen.compare).filter((trial) => visible(trial, chosen)) };
}

async function render() {
  const chosen = filters();
  const id = root.dataset.id;
  const trials = data.trials.filter((trial) => visible(trial, chosen));
  const knobs = knobsOf(data.trials);
  drawKnobs(id, knobs, trials, data.samples, chosen.pass);
  drawLines(id, knobs, trials);
  drawImportance(id, knobs, trials);
  drawWorkers(id, data.attempts, trials);
  let other = null;
  try {
    other = await beside(chosen);
  } catch (error) {
    showProblem(document.getElementById("problem"), error);
  }
  drawPareto(id, trials, data.sweep.memory_limit_bytes, other);
}

async function load() {
  try {
    [data.sweep, data.trials, data.samples, data.attempts] = await Promise.all([
      call(address), all(`${address}/trials?limit=500`), all(`${address}/samples?limit=5000`), all(`${address}/attempts?limit=500`),
    ]);
    await render();
  } catch (error) {
    showProblem(document.getElementById("problem"), error);
  }
}

function follow() {
  const live = document.getElementById("live");
  if (root.dataset.final === "true") { live.hidden = true; return; }
  const source = new EventSource(`${address}/events`);
  let timer = null;
  const soon = () => {
    // Events come in bursts: one reload serves them all.
    if (timer !== null) return;
    timer = setTimeout(async () => {
      timer = null;
      await load();
      window.htmx.trigger("#trials", "flatpeak:refresh");
      window.htmx.trigger("#summary", "flatpeak:refresh");
    }, 700);
  };
  source.onopen = () => { live.dataset.state = "open"; live.textContent = "Live"; };
  source.onerror = () => { live.dataset.state = "lost"; live.textContent = "Reconnecting"; };
  source.onmessage = soon;
  source.addEventListener("end", () => { source.close(); live.hidden = true; soon(); });
  window.addEventListener("pagehide", () => source.close());
}

form.addEventListener("change", render);
form.addEventListener("reset", () => setTimeout(() => form.dispatchEvent(new Event("change", { bubbles: true }))));
document.addEventListener("click", async (event) => {
  const button = event.target.closest("#cancel");
  if (!button) return;
  button.disabled = true;
  try {
    await call(`${address}/cancel`, { method: "POST" });
    window.htmx.trigger("#summary", "flatpeak:refresh");
  } catch (error) {
    button.disabled = false;
    showProblem(document.getElementById("problem"), error);
  }
});
await load();
follow();
