// The plan form: builds the same request a program would send to POST /v1/plans.
import { call, showProblem } from "./api.js";

const form = document.getElementById("plan");
const model = document.getElementById("model");
const paste = document.getElementById("paste");
const config = document.getElementById("config");
const file = document.getElementById("file");
const problem = document.getElementById("problem");
let uploaded = "";

const showPaste = () => { paste.hidden = model.value !== "paste"; };
model.addEventListener("change", showPaste);
showPaste();

file.addEventListener("change", async () => {
  const [chosen] = file.files;
  if (!chosen) return;
  uploaded = chosen.name.replace(/\.json$/i, "");
  config.value = await chosen.text();
});
config.addEventListener("input", () => { uploaded = ""; });

class Refusal extends Error {
  constructor(field, rule, value, remedy) {
    super(rule);
    this.field = field;
    this.body = { rule, value, remedy };
  }
}

function modelRef() {
  const [kind, ...rest] = model.value.split(":");
  if (kind === "example") return { example: rest.join(":") };
  if (kind === "id") return { id: rest.join(":") };
  let parsed;
  try {
    parsed = JSON.parse(config.value);
  } catch (error) {
    throw new Refusal("config", "the model's config.json must be valid JSON", String(error.message), "Paste the whole file, or choose an example.");
  }
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) {
    throw new Refusal("config", "config.json must hold one JSON object", typeof parsed, "Paste the whole file.");
  }
  return { hf_config: parsed, ...(uploaded && uploaded !== "config" ? { name: uploaded } : {}) };
}

function number(name) {
  const value = Number(form.elements[name].value);
  if (form.elements[name].value.trim() === "" || !Number.isFinite(value)) {
    throw new Refusal(name, `${name} must be a number`, form.elements[name].value, "Type a number.");
  }
  return value;
}

function request() {
  const [kind, ...rest] = form.elements.cluster.value.split(":");
  return {
    model: modelRef(),
    cluster: { [kind]: rest.join(":"), nodes: number("nodes") },
    workload: {
      context_tokens: number("context_tokens"), global_batch_tokens: number("global_batch_tokens"),
      imbalance: number("imbalance"), migrated_experts: number("migrated_experts"),
    },
    options: { mode: form.elements.mode.value },
  };
}

function mark(field) {
  for (const element of form.elements) element.removeAttribute("aria-invalid");
  const wrong = form.elements[field];
  if (!wrong) return;
  wrong.setAttribute("aria-invalid", "true");
  wrong.focus();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const submit = document.getElementById("submit");
  const busy = document.getElementById("busy");
  problem.replaceChildren();
  mark("");
  submit.disabled = true;
  busy.textContent = "Searching every legal layout…";
  try {
    const plan = await call("/v1/plans", { method: "POST", body: request() });
    location.assign(`/plans/${plan.id}`);
  } catch (error) {
    busy.textContent = "";
    const shown = error instanceof Refusal ? Object.assign(error, { status: 0 }) : error;
    showProblem(problem, shown);
    // A rule may name two fields; the first one is the one that broke it.
    const rule = String(shown.body?.rule || "");
    const [named] = ["context_tokens", "global_batch_tokens", "nodes", "imbalance", "migrated_experts"]
      .filter((name) => rule.includes(name)).sort((a, b) => rule.indexOf(a) - rule.indexOf(b));
    mark(shown.field || named || (rule.includes("config") ? "config" : ""));
  } finally {
    submit.disabled = false;
  }
});
