// Figures name colours as "@blue"; here they become those of the light or the dark theme, also when it changes.
const THEMES = {
  light: {
    text: "#1d2127", muted: "#5f6875", grid: "#e6e9ee", card: "#ffffff", line: "#aab2bd",
    blue: "#2f6fde", blue2: "#5b93ea", blue3: "#8fb7f3", blue4: "#b9d3f8", blue5: "#1d4fa8", blue6: "#143a7d",
    orange: "#e0762a", orange2: "#f09a5a", orange3: "#f6bd91", orange4: "#c25a12", orange5: "#9a430a",
    grey: "#9aa3af", grey2: "#bcc3cc", grey3: "#7b8592",
    green: "#2a9d63", red: "#c8453a", purple: "#8057c8", teal: "#1f98a6", pink: "#c94f92", yellow: "#c79a16",
  },
  dark: {
    text: "#e6e9ee", muted: "#98a2b0", grid: "#2b313a", card: "#1c2026", line: "#5a6472",
    blue: "#5b94f2", blue2: "#7fadf6", blue3: "#a9c8f9", blue4: "#c9dcfb", blue5: "#3f74cf", blue6: "#2f5aa6",
    orange: "#ee8b45", orange2: "#f4ac77", orange3: "#f8caa6", orange4: "#d0702c", orange5: "#a9581f",
    grey: "#8a94a2", grey2: "#b3bbc6", grey3: "#68727f",
    green: "#55c68c", red: "#ee7d70", purple: "#a98ae6", teal: "#4cc0cd", pink: "#e282b6", yellow: "#e0bd4e",
  },
};
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function coloured(value, palette) {
  if (typeof value === "string") return value[0] === "@" ? palette[value.slice(1)] : value;
  if (Array.isArray(value)) return value.map((item) => coloured(item, palette));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, palette)]));
  }
  return value;
}

function draw() {
  const palette = THEMES[dark.matches ? "dark" : "light"];
  for (const place of document.querySelectorAll(".chart")) {
    const figure = coloured(JSON.parse(document.getElementById(place.id + "-data").textContent), palette);
    Plotly.react(place, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  }
}
draw();
dark.addEventListener("change", draw);
