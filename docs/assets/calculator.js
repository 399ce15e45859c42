/* The calculator's page: reads the form, asks the model, writes the table. The model is in model.js. */
"use strict";

(() => {
  const place = document.getElementById("plan");
  if (!place) return;
  const data = JSON.parse(document.getElementById("calculator-data").textContent);
  const counts = GradwireModel.workerCounts(data);
  let machine = data.machine;

  const PRESETS = [
    ["your own", null, null],
    ["LeNet, 0.43 M (measured here)", 431080, 23],
    ["ResNet-20, 0.27 M (measured here)", 272474, 79],
    ["MLP, 10 M (measured here)", 10020874, 121],
    ["ResNet-50, 25.6 M", 25557032, null],
    ["BERT-base, 110 M", 109482240, null],
    ["GPT-2 small, 124 M", 124439808, null],
    ["7 billion", 7e9, null],
    ["70 billion", 7e10, null],
    ["10^12", 1e12, null],
  ];
  const FIELDS = [
    ["parameters", "Parameters of the model, millions", 10, 0.25, 1e6],
    ["compute", "Computing a step on one worker, ms (forward and backward, all micro-batches)", 120, 0.001, 1e9],
    ["micro", "Micro-batches a step (gradient accumulation)", 1, 1, 4096],
    ["hosts", "Machines (hosts)", 4, 1, 64],
    ["ranks", "Workers on each machine", 1, 1, 64],
    ["cores", "CPU cores of a machine, if workers compute on them (empty: on GPUs)", "", 1, 1024],
    ["bandwidth", "Bandwidth between machines, Mbit/s (empty: no limit)", 1000, 0.008, 600000],
    ["latency", "Delay between machines, one way, ms (0: same room)", 0, 0, 10000],
    ["loss", "Packets lost between machines, % (TCP with CUBIC)", 0, 0, 50],
  ];
  const WHOLE = ["micro", "hosts", "ranks", "cores"];
  const MAY_BE_EMPTY = ["cores", "bandwidth"];

  function element(name, attributes = {}, ...children) {
    const made = Object.assign(document.createElement(name), attributes);
    made.append(...children);
    return made;
  }

  const inputs = {};
  const form = element("form", { className: "calculator-form" });
  const preset = element("select", { id: "preset" });
  PRESETS.forEach(([name], i) => preset.append(element("option", { value: i, textContent: name })));
  form.append(element("label", {}, "Model", preset));
  for (const [name, label, value, min, max] of FIELDS) {
    inputs[name] = element("input", { type: "number", id: name, value, min, max, step: "any" });
    form.append(element("label", {}, label, inputs[name]));
  }
  const file = element("input", { type: "file", id: "calibration", accept: ".json" });
  form.append(element("label", {}, "Your calibration (~/.cache/gradwire/calibration.json)", file));
  const advice = element("p", { id: "advice", className: "calculator-advice" });
  advice.setAttribute("role", "status");
  const table = element("table", { id: "forecast" });
  const notes = element("ul", { id: "notes" });
  const command = element("code", { id: "command" });
  const download = element("a", { id: "profile", download: "model.json", textContent: "model.json" });
  const check = element("p", {}, "The same on your machine, with its own codecs: save ", download, " and run");
  place.replaceChildren(form, advice, element("div", { className: "calculator-table" }, table), notes, check);
  place.append(element("pre", {}, command));

  /** Read a field; an error names it. */
  function read(name) {
    const [, label, , min, max] = FIELDS.find((field) => field[0] === name);
    const text = inputs[name].value.trim();
    if (text === "" && inputs[name].validity.valid && MAY_BE_EMPTY.includes(name)) return null;
    const value = Number(text);
    if (text === "" || !(value >= min && value <= max) || (WHOLE.includes(name) && !Number.isInteger(value)))
      throw new RangeError(`${label}: ${WHOLE.includes(name) ? "a whole number" : "a number"} from ${min} to ${max} is needed`);
    return value;
  }

  function bytes(count) {
    for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (count >= size) return `${GradwireModel.general(count / size)}\u00a0${unit}`;
    return `${count} B`;
  }

  // A number stays with its unit.
  const seconds = (value) => GradwireModel.seconds(value).replace(" ", "\u00a0");

  function write(rows, chosen) {
    const header = ["method", "step", "80 % range", "times as fast", "sent a step", "bounded by", "at least"];
    const head = element("tr", {}, ...header.map((text) => element("th", { textContent: text })));
    const line = (row) => {
      const often = row.exchange_every > 1 ? " (mean)" : "";
      const cells = [
        row.method,
        seconds(row.step_s) + often,
        `${seconds(row.low_s)} to ${seconds(row.high_s)}`,
        row.speedup.toFixed(2),
        bytes(row.sent_bytes) + often,
        row.bottleneck,
        seconds(row.floor_s),
      ];
      const made = element("tr", {}, ...cells.map((text) => element("td", { textContent: text })));
      if (row.method === chosen) made.className = "chosen";
      return made;
    };
    const candidates = rows.filter((row) => !row.apart);
    const others = rows.filter((row) => row.apart);
    const title = element("th", { colSpan: header.length, textContent: "Not to be chosen by the time of a step: see below" });
    table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...candidates.map(line)));
    if (others.length)
      table.append(
        element("tbody", { className: "apart" }, element("tr", { className: "title" }, title), ...others.map(line)),
      );
    const said = rows.filter((row) => row.apart).map((row) => `${row.method} is not recommended for its time: it ${row.apart}.`);
    if (rows[0].extrapolated)
      said.push(`Extrapolated, the range may not hold: ${rows[0].extrapolated}.`);
    notes.replaceChildren(...said.map((text) => element("li", { textContent: text })));
  }

  function fail(message) {
    advice.textContent = message;
    advice.classList.add("wrong");
    table.replaceChildren();
    notes.replaceChildren();
    command.textContent = "";
  }

  function update() {
    try {
      const value = Object.fromEntries(FIELDS.map(([name]) => [name, read(name)]));
      const workers = value.hosts * value.ranks;
      if (!counts.includes(workers))
        throw new RangeError(
          `${workers} workers: the page knows ${counts.join(", ")}. For others ask gradwire plan --hosts ${value.hosts}` +
            ` --gpus-per-host ${value.ranks}`,
        );
      const question = {
        parameters: Math.round(value.parameters * 1e6),
        computeS: value.compute / 1e3,
        microBatches: value.micro,
      };
      // Beyond it, the smaller model that stands in for it is not the one that was asked for.
      const playable = question.parameters <= GradwireModel.LARGEST;
      const setting = {
        hosts: value.hosts,
        ranksPerHost: value.ranks,
        cores: value.cores,
        bytesPerS: value.bandwidth === null ? null : (value.bandwidth * 1e6) / 8,
        latencyS: value.latency / 1e3,
        loss: value.loss / 100,
      };
      const rows = GradwireModel.forecastOf(data, question, setting, machine);
      const { method, reason } = GradwireModel.recommend(rows, data.constants);
      advice.textContent = reason[0].toUpperCase() + reason.slice(1) + ".";
      advice.classList.remove("wrong");
      write(rows, method);
      const profile = playable ? GradwireModel.profileOf(question) : null;
      download.href = `data:application/json,${encodeURIComponent(JSON.stringify(profile))}`;
      check.hidden = command.parentElement.hidden = !playable;
      const rate = value.bandwidth === null ? "unlimited" : `${value.bandwidth * 1e3}kbit`;
      const cores = value.cores === null ? "" : ` --cores ${value.cores}`;
      command.textContent =
        `gradwire plan --profile model.json --hosts ${value.hosts} --gpus-per-host ${value.ranks}${cores}` +
        ` --bandwidth ${rate} --delay ${value.latency}ms --loss ${value.loss}% --congestion cubic`;
      const asked = new URLSearchParams(FIELDS.map(([name]) => [name, inputs[name].value]));
      history.replaceState(null, "", `#${asked}`);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      fail(error.message);
    }
  }

  preset.addEventListener("change", () => {
    const [, parameters, compute] = PRESETS[preset.value];
    if (parameters) inputs.parameters.value = parameters / 1e6;
    if (compute) inputs.compute.value = compute;
    update();
  });
  file.addEventListener("change", async () => {
    const names = Object.keys(data.machine);
    try {
      const found = file.files.length ? JSON.parse(await file.files[0].text()) : data.machine;
      const missing = names.filter((name) => !(name in found));
      if (missing.length) throw new RangeError(`it lacks ${missing.join(", ")}`);
      machine = found;
      update();
    } catch (error) {
      fail(`${file.files[0].name} holds no calibration (${error.message}): make one with gradwire plan --calibrate`);
    }
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target !== preset && event.target !== file) update();
  });
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const [name] of FIELDS) if (asked.has(name)) inputs[name].value = asked.get(name);
  update();
})();
