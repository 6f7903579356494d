// Reads the public /v1 addresses. A problem document becomes an Error that carries rule, value and remedy.
export class Problem extends Error {
  constructor(body, status) {
    super(body.rule || `HTTP ${status}`);
    this.body = body;
    this.status = status;
  }
}

export async function call(address, { method = "GET", body, headers = {} } = {}) {
  const response = await fetch(address, {
    method,
    credentials: "same-origin",
    headers: { Accept: "application/json", ...(body ? { "Content-Type": "application/json" } : {}), ...headers },
    body: body ? JSON.stringify(body) : undefined,
  });
  const text = await response.text();
  let parsed = {};
  try { parsed = text ? JSON.parse(text) : {}; } catch { parsed = { rule: text.slice(0, 200) }; }
  if (!response.ok) throw new Problem(parsed, response.status);
  return parsed;
}

// Every item of a collection, page after page along its cursors.
export async function all(address, most = 20000) {
  const items = [];
  let cursor = null;
  do {
    const url = new URL(address, location.origin);
    if (cursor) url.searchParams.set("cursor", cursor);
    const page = await call(url.pathname + url.search);
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return items;
}

export function showProblem(target, error) {
  const problem = error.body || { rule: String(error.message || error) };
  const box = document.createElement("div");
  box.className = "notice bad";
  box.setAttribute("role", "alert");
  const title = document.createElement("h3");
  title.textContent = problem.rule || "Something went wrong";
  box.append(title);
  for (const [label, value] of [["Value", problem.value], ["What to do", problem.remedy]]) {
    if (value === undefined || value === null || value === "") continue;
    const line = document.createElement("p");
    const strong = document.createElement("strong");
    strong.textContent = `${label}: `;
    line.append(strong, typeof value === "string" ? value : JSON.stringify(value));
    box.append(line);
  }
  target.replaceChildren(box);
  box.scrollIntoView({ block: "nearest" });
}
