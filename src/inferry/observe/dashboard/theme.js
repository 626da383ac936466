// Runs before the first paint, so that a chosen theme shows at once. Without a choice the system's theme applies.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("inferry-theme");
  } catch {
    // Storage may be disabled: the system's theme applies.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
