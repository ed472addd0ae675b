// One run in full: its fleet, its settings and how to repeat it.
function fleetCard(run) {
  const devices = Math.max(
    1,
    run.fleet.reduce((sum, row) => sum + row.devices, 0),
  );
  const bars = run.fleet.map((row) => [
    h("b", {}, String(row.capacity)),
    h("i", { style: `width: ${((100 * row.devices) / devices).toFixed(1)}%` }),
    h("span", { class: "soft said" }, `${row.devices} of ${devices} devices`),
  ]);
  const columns = [
    ["capacity", false],
    ["devices as written", true],
    ["clients seen", true],
    ["updates", true],
    ["noise δ²", true],
    ["training loss, last quarter", true],
  ];
  return h(
    "section",
    { class: "card", id: "fleet" },
    h("h3", {}, "The fleet"),
    h(
      "p",
      { class: "small soft" },
      `${run.settings.fleet}: shares of the model's ${run.settings.capacity === "parameters" ? "parameters" : "width"}; ${run.settings.clients} clients, ${run.settings.active} a round, data ${run.settings.partition}.`,
    ),
    h(
      "div",
      { class: "meter", role: "img", "aria-label": "Devices by capacity; the table below has the numbers" },
      bars,
    ),
    scroller(
      {},
      table(
        columns,
        run.fleet.map((row) => [
          String(row.capacity),
          whole(row.devices),
          whole(row.clients),
          whole(row.updates),
          percent(row.delta2),
          compact(row.loss),
        ]),
      ),
    ),
  );
}

function answersCard(run) {
  // only where the clients were real devices is there anything to say
  if (!run.answers) return null;
  const { counts, causes, more } = run.answers;
  const told = Object.entries(counts).map(([kind, number]) => `${whole(number)} ${kind}`);
  const columns = [
    ["rounds", false],
    ["what", false],
    ["times", true],
    ["who", false],
    ["why", false],
  ];
  return h(
    "section",
    { class: "card", id: "answers" },
    h("h3", {}, "Answers"),
    h("p", { class: "small soft" }, `What became of the devices' tasks: ${told.join(", ")}.`),
    causes.length
      ? scroller(
          {},
          table(
            columns,
            causes.map((cause) => [cause.rounds, cause.event, whole(cause.times), cause.who, cause.why]),
          ),
        )
      : null,
    more ? h("p", { class: "small soft" }, `${whole(more)} rarer causes are not shown.`) : null,
  );
}

function experimentCard(run) {
  const differs = new Set(GROUPS.flatMap((group) => Object.keys(group.settings)));
  const lines = run.toml
    .trimEnd()
    .split("\n")
    .flatMap((line) => [differs.has(line.split(" =")[0]) ? h("mark", {}, line) : line, "\n"]);
  const python = run.custom.length
    ? h(
        "p",
        { class: "warn" },
        `This run used its own ${run.custom.join(" and ")}, made in Python: give the same to fedcover.run, the settings alone do not repeat it.`,
      )
    : null;
  return h(
    "section",
    { class: "card", id: "experiment" },
    h("h3", {}, "The experiment, and how to repeat it"),
    h("p", { class: "small soft" }, differs.size ? "Marked: the settings in which the runs of this page differ." : ""),
    python,
    h("pre", { tabindex: 0, "aria-label": "experiment.toml" }, lines),
    copyButton("Copy experiment.toml", () => run.toml),
    h("p", {}, "Save it as ", h("code", {}, "experiment.toml"), ", then:"),
    h("pre", { tabindex: 0, "aria-label": "commands" }, run.commands.join("\n")),
    copyButton("Copy commands", () => run.commands.join("\n")),
    h(
      "details",
      {},
      h("summary", {}, "Versions and machine"),
      scroller(
        {},
        table(
          [
            ["what", false],
            ["value", false],
          ],
          Object.entries(run.manifest),
        ),
      ),
    ),
  );
}
