// Light and dark theme: that of the system, until the reader chooses one.

const THEMES = ["auto", "light", "dark"];

function rememberedTheme() {
  try {
    return localStorage.getItem("grpo-theme") || "auto";
  } catch {
    return "auto"; // the browser has no storage for local files
  }
}

function applyTheme(name) {
  document.documentElement.style.colorScheme = name === "auto" ? "light dark" : name;
  document.documentElement.dataset.theme = name;
}

/** Creates the button that switches between auto, light and dark. */
function themeButton() {
  let name = rememberedTheme();
  const button = element("button", { type: "button", class: "quiet", id: "theme" });
  const show = () => {
    applyTheme(name);
    button.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[name];
    button.setAttribute("aria-label", `Colours: ${name}; press for the next`);
  };
  button.addEventListener("click", () => {
    name = THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
    try {
      localStorage.setItem("grpo-theme", name);
    } catch { /* the choice holds until the page is closed */ }
    show();
  });
  show();
  return button;
}

const LINES = 6;

/** Returns the CSS colour of a line. Colours repeat after six lines with other dashes. */
function lineColour(index) {
  return `var(--line-${(index % LINES) + 1})`;
}

function lineDash(index) {
  return ["", "6 3", "2 3"][Math.floor(index / LINES) % 3];
}
