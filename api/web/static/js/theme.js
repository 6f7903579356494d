// Light, dark or the system's choice; kept in this browser only.
(() => {
  const key = "flatpeak-theme";
  const order = ["auto", "light", "dark"];
  const stored = () => {
    try { return localStorage.getItem(key) || "auto"; } catch { return "auto"; }
  };
  const apply = (theme) => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
  };
  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    const label = () => { button.textContent = `Theme: ${stored()}`; };
    label();
    button.addEventListener("click", () => {
      const next = order[(order.indexOf(stored()) + 1) % order.length];
      try { localStorage.setItem(key, next); } catch { /* storage refused: the choice lasts for this page */ }
      apply(next);
      label();
      document.dispatchEvent(new CustomEvent("flatpeak:theme"));
    });
  });
})();
