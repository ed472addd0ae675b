// Eight colours that stay apart for colour-blind eyes, and beyond colour a dash and a marker: three ways to tell a line.
const COLOURS = 8;
const DASHES = ["", "8 4", "2 3", "10 3 2 3", "5 2", "14 4", "4 4 1 4"];
const MARKERS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  "M-3.6,-3.6H3.6V3.6H-3.6Z",
  "M0,-5L4.6,3.4H-4.6Z",
  "M0,-5.2L5.2,0L0,5.2L-5.2,0Z",
  "M-4,-4L4,4M4,-4L-4,4",
  "M0,5L4.6,-3.4H-4.6Z",
  "M0,-5V5M-5,0H5",
  "M0,-5.5L1.6,-1.8L5.5,-1.5L2.5,1L3.4,5L0,2.8L-3.4,5L-2.5,1L-5.5,-1.5L-1.6,-1.8Z",
];

const styleOf = (place) => ({
  colour: `var(--c${place % COLOURS})`,
  dash: DASHES[(place + Math.floor(place / COLOURS)) % DASHES.length],
  marker: MARKERS[(place + 3 * Math.floor(place / COLOURS)) % MARKERS.length],
});

const markerAt = (style, x, y, extra) =>
  svg("path", {
    d: style.marker,
    transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    fill: "var(--card)",
    stroke: style.colour,
    "stroke-width": 2,
    ...extra,
  });

const swatch = (style) =>
  svg(
    "svg",
    { class: "swatch", width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" },
    svg("line", {
      x1: 1,
      x2: 33,
      y1: 7,
      y2: 7,
      stroke: style.colour,
      "stroke-width": 2.2,
      "stroke-dasharray": style.dash,
    }),
    markerAt(style, 17, 7),
  );

function resolved(name) {
  // a colour of the style sheet as red, green, blue: canvases know no variables
  const probe = h("i", { style: `color: var(--${name})` });
  document.body.append(probe);
  const found = getComputedStyle(probe)
    .color.match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
  probe.remove();
  return found;
}
const mixed = (from, to, share) =>
  `rgb(${from.map((value, place) => Math.round(value + (to[place] - value) * share)).join(",")})`;
