// What is shown: one place that knows the filters, and tells everybody when they change.
const DATA = JSON.parse(document.getElementById("data").textContent);
const GROUPS = DATA.groups.map((group, place) => ({ ...group, place, style: styleOf(place) }));
const SEEDS = [...new Set(DATA.runs.map((run) => run.seed))].sort((a, b) => a - b);
const shown = {
  without: {},
  seeds: new Set(SEEDS),
  words: "",
  hidden: new Set(),
  axis: "round",
  single: false,
  run: 0,
};
shown.run = Math.max(
  0,
  DATA.runs.findIndex((run) => run.totals.delta2_mean > 0),
); // rather one that cuts something away
const listeners = [];

const onChange = (listener) => listeners.push(listener);
function change(values) {
  Object.assign(shown, values);
  for (const listener of listeners) listener();
}

const runsOf = (group) => group.runs.map((place) => DATA.runs[place]).filter((run) => shown.seeds.has(run.seed));

function passes(group) {
  const text = [group.label, ...group.runs.flatMap((place) => [DATA.runs[place].name, DATA.runs[place].folder])];
  return (
    runsOf(group).length > 0 &&
    shown.words
      .toLowerCase()
      .split(/\s+/)
      .every((word) => text.join(" ").toLowerCase().includes(word)) &&
    Object.entries(group.settings).every(([name, value]) => !shown.without[name]?.has(value))
  );
}
const listed = () => GROUPS.filter(passes);
const NO_MATCH = "No run matches: \u201cShow all\u201d brings all of them back.";
const drawn = () => listed().filter((group) => !shown.hidden.has(group.place));

function whyNothing(unmeasured) {
  if (!listed().length) return NO_MATCH;
  return drawn().length ? `Nothing to draw yet: ${unmeasured}` : "Every run is hidden: press one above the plots.";
}

function curve(runs, part, name, axis) {
  // the mean over seeds at every round that any of them has, with the lowest, the highest and how many there were
  const met = new Map();
  for (const run of runs) {
    const values = run[part][name] || [];
    values.forEach((y, place) => {
      if (!number(y)) return;
      const round = run[part].round[place];
      if (!met.has(round)) met.set(round, []);
      met.get(round).push([run[part][axis][place], y]);
    });
  }
  return [...met.entries()]
    .sort((a, b) => a[0] - b[0])
    .map(([round, pairs]) => {
      const ys = pairs.map((pair) => pair[1]);
      return {
        round,
        x: mean(pairs.map((pair) => pair[0])),
        y: mean(ys),
        low: Math.min(...ys),
        high: Math.max(...ys),
        n: ys.length,
      };
    });
}

function series(part, name) {
  return drawn().flatMap((group) => {
    const runs = runsOf(group);
    const sets = shown.single ? runs.map((run) => [run]) : [runs];
    return sets
      .map((some) => ({
        group: group.place,
        label: shown.single && runs.length > 1 ? `${group.label}, seed ${some[0].seed}` : group.label,
        style: group.style,
        points: curve(some, part, name, shown.axis),
        of: some.length,
      }))
      .filter((line) => line.points.length);
  });
}

function highlight(place) {
  for (const element of document.querySelectorAll("[data-group]"))
    element.classList.toggle("dim", place !== null && element.dataset.group !== String(place));
}

function total(group, name) {
  const values = runsOf(group)
    .map((run) => run.totals[name])
    .filter(number);
  if (!values.length) return null;
  const spread = values.length > 1 ? deviation(values) : 0;
  return { mean: mean(values), spread, low: Math.min(...values), high: Math.max(...values), n: values.length };
}

function statusOf(run) {
  if (run.notFinite) return `no finite loss from round ${run.notFinite}`;
  if (!run.done) return "no round done yet";
  return run.done < run.rounds ? `${run.done} of ${run.rounds} rounds` : `${run.rounds} rounds`;
}
