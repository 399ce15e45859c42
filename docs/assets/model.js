/* The performance model of `gradwire plan`, in the browser.
 *
 * A port of gradwire/model/schedule.py, cycle.py and forecast.py over the numbers that benchmarks/pages/calculator.py exports.
 * No part of it touches the page, so that any JavaScript engine runs it; tests compare it with the command.
 */
"use strict";

const GradwireModel = (() => {
  const DONE = 1e-12;
  const FIRST_BUCKET = 1 << 18; // DDP's first bucket, 1 MiB of float32
  const BUCKET = 25 << 18; // its later ones, 25 MiB
  const FORWARD = 1 / 3; // of a micro-batch's computation
  const LARGEST = 2e9; // parameters up to which every bucket of a step is played
  const MEASURED = 10020874; // parameters of the largest model whose steps were measured
  const RING_SEGMENT = 1 << 20; // largest number of bytes of a segment in Gloo's ring
  const TCP_SEGMENT = 1448; // payload of a TCP segment
  const LEAST_TIMEOUT = 0.2; // seconds beyond the round trip after which a lost last packet is sent again

  /* ---- what is asked ---- */

  /** A step's buckets as DDP lays them out, for a model of which only the size is known. */
  function profileOf({ parameters, computeS, microBatches = 1 }) {
    const buckets = [];
    for (let left = parameters; left > 0; ) {
      const numel = Math.min(left, buckets.length ? BUCKET : FIRST_BUCKET);
      buckets.push({ names: [`part${buckets.length}`], numel });
      left -= numel;
    }
    // Gradients add up without an exchange in all micro-batches but the last.
    const one = computeS / microBatches;
    const backwardS = one * (1 - FORWARD);
    let ready = 0;
    for (const bucket of buckets) {
      ready += bucket.numel;
      bucket.ready_s = (backwardS * ready) / parameters;
    }
    const shapes = {};
    // The last bucket holds the first parameters.
    for (const bucket of [...buckets].reverse()) shapes[bucket.names[0]] = [[bucket.numel], [1]];
    return {
      source: `${parameters} parameters`,
      parameters: shapes,
      timeline: { forward_s: computeS - backwardS, buckets, backward_s: backwardS, after_s: 0 },
    };
  }

  const total = (timeline) => timeline.forward_s + timeline.backward_s + timeline.after_s;

  function scaled(timeline, computeS) {
    const k = computeS / total(timeline);
    return {
      forward_s: timeline.forward_s * k,
      buckets: timeline.buckets.map((b) => ({ ...b, ready_s: b.ready_s * k })),
      backward_s: timeline.backward_s * k,
      after_s: timeline.after_s * k,
    };
  }

  /* ---- what a method does with a bucket ---- */

  /** A number that is known at some lengths, on the straight line through the two that are nearest. */
  function at(values, numel, lengths) {
    let last = lengths.findIndex((length) => length >= numel);
    if (last === -1) last = lengths.length - 1;
    const [i, j] = [Math.max(last, 1) - 1, Math.max(last, 1)];
    const slope = lengths[j] > lengths[i] ? (values[j] - values[i]) / (lengths[j] - lengths[i]) : 0;
    return Math.max(0, values[i] + slope * (numel - lengths[i]));
  }

  /** One-way delays of Gloo's ring; see gradwire/exchange/drivers/delays.py. */
  function ringDelays(sentBytes, workers) {
    const size = Math.round((sentBytes * workers) / (2 * (workers - 1)));
    const each = Math.ceil(Math.max(Math.ceil(size / RING_SEGMENT), 2 * workers) / workers);
    return 4 * Math.ceil((each * (workers - 1)) / 2);
  }

  function stageOf(stage, numel, workers, constants, whole) {
    const workS = at(stage.work_s, numel, constants.lengths);
    if (!stage.kind) return { workS, kind: "", sentBytes: 0, rounds: 0, messages: 0, delays: 0 };
    const bytes = (values) => at(values, whole(numel), constants.lengths.map(whole));
    const sentBytes = Math.round(bytes(stage.sent_bytes));
    const others = workers - 1;
    if (stage.kind === "ring") {
      const delays = ringDelays(sentBytes, workers);
      return { workS, kind: "ring", sentBytes, rounds: 2 * others, messages: 2 * others, delays };
    }
    const large = stage.kind !== "gather" && bytes(stage.row_bytes) >= constants.large_bytes;
    return {
      workS,
      kind: large ? "pairs" : stage.kind,
      sentBytes,
      rounds: large ? others : 1,
      messages: others * (1 + stage.lengths),
      delays: 1, // it has been requested before
    };
  }

  /** One bucket's preparation and chunks. */
  function jobsOf(method, numel, workers, constants) {
    const known = method.workers[workers];
    // Shares are of whole blocks, and as long as the longest.
    const all = known.shares * method.block_size;
    const whole = (count) => (known.shares > 1 ? Math.ceil(count / all) * all : count);
    const stages = (part, count) => part.map((stage) => stageOf(stage, count, workers, constants, whole));
    const chunks = [];
    // The backend's sum is not cut: at another offset it would add in another order.
    const most = known.chunk.some((stage) => stage.kind === "ring") ? numel : constants.chunk_numel;
    for (let left = numel; left > 0; left -= most) chunks.push(stages(known.chunk, Math.min(left, most)));
    return { asynchronous: known.asynchronous, prepare: stages(known.prepare, numel), chunks };
  }

  /** Jobs of every bucket; a link exchanges the buckets of a small model as one, when the last is there. */
  function bucketsOf(known, timeline, workers, constants) {
    const numel = timeline.buckets.reduce((sum, b) => sum + b.numel, 0);
    if (!known.joins || numel > constants.joined_numel)
      return timeline.buckets.map((b) => jobsOf(known, b.numel, workers, constants));
    const nothing = { asynchronous: false, prepare: [], chunks: [] };
    return [...timeline.buckets.slice(1).map(() => nothing), jobsOf(known, numel, workers, constants)];
  }

  const allStages = (buckets) => buckets.flatMap((b) => [b.prepare, ...b.chunks]).flat();
  const sentBytes = (buckets) => allStages(buckets).reduce((sum, s) => sum + s.sentBytes, 0);

  function bare(bucket) {
    const none = (part) => part.map((s) => ({ ...s, workS: 0 }));
    return { ...bucket, prepare: none(bucket.prepare), chunks: bucket.chunks.map(none) };
  }

  /* ---- a step: runners that share cores and the link ---- */

  function leaving(link, bytes, ring, workers) {
    const here = link.ranksPerHost;
    if (workers <= here) return 0;
    return ring ? bytes / here : (bytes * (workers - here)) / (workers - 1);
  }

  const stretchOf = (load) => Math.max(1, load.ranks / load.cores);
  const runnersOf = (load) => Math.max(1, load.cores / load.ranks);
  const sends = (item) => item.latencyS <= DONE && item.bytes > 1e-6;
  const travels = (item) => item.latencyS <= DONE && item.travelS > DONE;
  const over = (item) => item.cpuS <= DONE && item.latencyS <= DONE && !sends(item) && !travels(item);

  /** Let time pass for an item, with a share of a core and a rate of bytes. */
  function passTime(item, seconds, speed, rate) {
    const [sent, travelled] = [sends(item), travels(item)];
    if (item.cpuS > DONE) item.cpuS -= seconds * speed;
    if (item.latencyS > DONE) item.latencyS -= seconds;
    if (sent) item.bytes -= seconds * rate;
    if (!travelled) return;
    item.travelS -= seconds;
    if (item.travelS > DONE) return;
    item.bytes += item.heldBytes;
    item.heldBytes = 0;
  }

  function currentOf(jobs) {
    while (jobs.length) {
      const job = jobs[0];
      if (job.after && !job.after.done) return null;
      while (job.items.length && over(job.items[0])) job.items.shift();
      if (job.items.length) return job.items[0];
      job.done = true;
      jobs.shift();
    }
    return null;
  }

  function currentItems(runners) {
    const count = () => runners.reduce((sum, jobs) => sum + jobs.length, 0);
    for (;;) {
      const left = count();
      const items = runners.map(currentOf).filter((item) => item);
      if (left === count()) return items;
    }
  }

  /** Equal shares of the link, of which the slow leave their rest to the others; brings the items into order. */
  function shares(sending, flow) {
    sending.sort((a, b) => (a.mostBytesPerS < b.mostBytesPerS ? -1 : a.mostBytesPerS > b.mostBytesPerS ? 1 : 0));
    const rates = [];
    let taken = 0;
    sending.forEach((item, done) => {
      const share = flow === Infinity ? flow : (flow - taken) / (sending.length - done);
      rates.push(Math.min(item.mostBytesPerS, share));
      taken += rates[done];
    });
    return rates;
  }

  function moment(runners, flow, load) {
    const items = currentItems(runners);
    const working = items.filter((i) => i.cpuS > DONE);
    // Of items that take turns, the one of the earliest job sends before the others.
    const inTurn = items.filter((i) => sends(i) && i.turn !== null).sort((a, b) => a.turn - b.turn);
    const sending = [...items.filter((i) => sends(i) && i.turn === null), ...inTurn.slice(0, 1)];
    const speed = working.length ? Math.min(1, runnersOf(load) / working.length) : 1;
    const rates = shares(sending, flow);
    for (const item of inTurn.slice(1)) {
      const rate = Math.min(item.mostBytesPerS, flow - rates.reduce((sum, r) => sum + r, 0));
      if (!(rate > 1e-6)) continue;
      sending.push(item);
      rates.push(rate);
    }
    const passed = Math.min(
      ...working.map((i) => i.cpuS / speed),
      ...items.filter((i) => i.latencyS > DONE).map((i) => i.latencyS),
      ...items.filter(travels).map((i) => i.travelS),
      ...sending.map((i, k) => i.bytes / rates[k]),
    );
    const rateOf = new Map(sending.map((i, k) => [i, rates[k]]));
    for (const i of items) passTime(i, passed, speed, rateOf.get(i) || 0);
    return passed;
  }

  const cpu = (seconds) => ({
    cpuS: Math.max(0, seconds),
    latencyS: 0,
    bytes: 0,
    turn: null,
    mostBytesPerS: Infinity,
    travelS: 0,
    heldBytes: 0,
  });

  /** Bytes a second of one TCP connection; see connection_rate in gradwire/model/machine.py. */
  function connectionRate(delayS, loss) {
    if (!loss || !delayS) return Infinity;
    const reno = Math.sqrt(1.5 / loss);
    const cubic = ((0.4 * 3.7) / (4 * 0.3)) ** 0.25 * ((2 * delayS) / loss) ** 0.75;
    return (TCP_SEGMENT * Math.max(reno, cubic)) / (2 * delayS);
  }

  /** See LinkModel.resending_s in gradwire/model/machine.py; TCP is taken for CUBIC. */
  function resendingS(link, messages, turns, sentBytes) {
    if (!link.loss || !turns || !messages) return 0;
    const lost = -Math.expm1((messages / turns) * Math.log1p(-link.loss));
    const [roundTrip, packets] = [2 * link.latencyS, sentBytes / messages / TCP_SEGMENT];
    const timeout = roundTrip + LEAST_TIMEOUT;
    return turns * lost * (packets > 1 ? Math.min(timeout, 2 * roundTrip + 0.008) : timeout);
  }

  /** The step of one worker: see step_time in gradwire/model/schedule.py. */
  function stepTime(timeline, buckets, workers, { machine, link, load }) {
    const lanes = 2;
    const factor = stretchOf(load) * machine.contention;
    const flow = link.bytesPerS ? link.bytesPerS / link.ranksPerHost : Infinity;
    const connection = connectionRate(link.latencyS, link.loss);

    function itemsOf(stage, number) {
      const items = [];
      if (stage.workS) items.push(cpu(stage.workS * factor));
      if (stage.kind) {
        const ring = stage.kind === "ring";
        const alone = ring || stage.kind === "pairs" || stage.kind === "broadcast";
        const byteS = ring ? machine.sum_byte_s : machine.byte_s;
        const efficiency = machine.efficiency;
        const sent = leaving(link, stage.sentBytes, ring, workers);
        const rate = connection * (alone ? 1 : Math.max(1, workers - link.ranksPerHost));
        const travelS = stage.delays * link.latencyS;
        // A ring asks for each message in its turn; other messages have been asked for before.
        const [turns, each] = ring ? [Math.floor(stage.delays / 2), 2] : [stage.delays, 1];
        const resent = resendingS(link, each * stage.messages * workers, turns, sent * workers);
        const bytes = link.bytesPerS || rate < Infinity ? sent / efficiency : 0;
        // Of a ring's two segments under way, one's bytes are sent while the other's travel.
        const heldBytes = ring && travelS ? bytes / 2 : 0;
        items.push({
          cpuS: (machine.call_s + machine.message_s * stage.messages + byteS * stage.sentBytes) * factor,
          latencyS: stage.rounds * machine.round_s * stretchOf(load) + resent + (ring ? 0 : travelS),
          bytes: bytes - heldBytes,
          mostBytesPerS: rate / efficiency,
          travelS: ring ? travelS : 0,
          heldBytes,
          turn: stage.kind === "pairs" ? number : null,
        });
      }
      return items;
    }

    const main = [];
    const runners = [main, ...Array.from({ length: lanes }, () => [])];
    let jobs = 0;
    function queue(stages, lane, after = null) {
      const number = jobs++;
      const job = { items: stages.flatMap((stage) => itemsOf(stage, number)), after, done: false };
      runners[1 + (lane % lanes)].push(job);
      return job;
    }
    function submit(number, bucket) {
      if (bucket.asynchronous) {
        // Its first work was done by the thread that brought the bucket.
        // The backend's threads share one connection to each rank, which matters where losses limit it.
        const apart = connection === Infinity;
        bucket.chunks.forEach((chunk, i) => {
          const stages = chunk.map((s, k) => (k ? s : { ...s, workS: 0 }));
          queue(stages, apart ? number + i : 0);
        });
      } else if (bucket.chunks.length === 1) {
        queue([...bucket.prepare, ...bucket.chunks[0]], number);
      } else {
        const first = queue(bucket.prepare, number);
        bucket.chunks.forEach((chunk, i) => queue(chunk, number + i, first));
      }
    }
    function compute(seconds) {
      main.push({ items: [cpu(seconds)], after: null, done: false });
      let passed = 0;
      while (currentOf(main)) passed += moment(runners, flow, load);
      return passed;
    }

    let busy = 0;
    let now = compute(timeline.forward_s);
    let lastReady = 0;
    timeline.buckets.forEach((ready, number) => {
      const bucket = buckets[number];
      let inline = machine.bucket_s * factor;
      if (bucket.asynchronous)
        inline += bucket.chunks.reduce((sum, chunk) => sum + (chunk.length ? chunk[0].workS : 0), 0) * factor;
      busy += inline;
      now += compute(ready.ready_s - lastReady + inline);
      lastReady = ready.ready_s;
      submit(number, bucket);
    });
    now += compute(timeline.backward_s - lastReady);
    while (currentItems(runners.slice(1)).length) now += moment(runners.slice(1), flow, load);
    for (const bucket of buckets)
      for (const job of [bucket.prepare, ...bucket.chunks])
        job.forEach((stage, k) => {
          const spent = itemsOf(stage).reduce((sum, i) => sum + i.cpuS, 0);
          busy += spent - (bucket.asynchronous && !k ? stage.workS * factor : 0);
        });
    const wire = link.bytesPerS
      ? allStages(buckets).reduce((sum, s) => sum + leaving(link, s.sentBytes, s.kind === "ring", workers), 0) / flow
      : 0;
    return { stepS: now + timeline.after_s, computeS: total(timeline), busyS: busy, wireS: wire };
  }

  function bottleneck(steps) {
    if (steps.stepS <= 1.1 * steps.computeS) return "compute";
    const [name, value] =
      steps.wireS >= steps.busyS ? ["link", steps.wireS] : ["codec and collectives", steps.busyS];
    return value >= 0.5 * (steps.stepS - steps.computeS) ? name : "latency";
  }

  /* ---- methods with local steps ---- */

  /** Buckets of one exchange of all parameters, which are there when it begins. */
  function ownBuckets(timeline, constants) {
    const most = 4 * constants.chunk_numel;
    const buckets = [];
    for (const bucket of timeline.buckets) {
      const open = buckets[buckets.length - 1];
      if (open && open.numel + bucket.numel <= most) open.numel += bucket.numel;
      else buckets.push({ numel: bucket.numel, ready_s: 0 });
    }
    return buckets;
  }

  function cycleTime(timeline, known, workers, place, constants) {
    const { every, delay, own_s_per_element: ownS } = known.local;
    const own = ownBuckets(timeline, constants);
    const numel = own.reduce((sum, b) => sum + b.numel, 0);
    const buckets = own.map((b) => jobsOf(known, b.numel, workers, constants));
    const factor = stretchOf(place.load) * place.machine.contention;
    const empty = {
      forward_s: 0,
      buckets: own,
      backward_s: delay * total(timeline),
      after_s: factor * ownS * numel,
    };
    const part = stepTime(empty, buckets, workers, place);
    const steps = {
      stepS: ((every - delay) * total(timeline) + part.stepS) / every,
      computeS: total(timeline),
      busyS: (part.busyS + factor * ownS * numel) / every,
      wireS: part.wireS / every,
    };
    return { steps, sent: sentBytes(buckets) / every };
  }

  /* ---- forecasts and advice ---- */

  function beyond(machine, workers, link, far) {
    if (machine.most_workers === null) return null;
    if (workers > far * machine.most_workers) return `more workers than calibrated (at most ${machine.most_workers})`;
    const [slow, fast] = [machine.slowest_bytes_per_s, machine.fastest_bytes_per_s];
    if (!link.bytesPerS || workers <= link.ranksPerHost) return null;
    if (slow === null || fast === null) return "no limited link was calibrated";
    if (link.bytesPerS < slow / far || link.bytesPerS > far * fast)
      return `a link far from those calibrated (${general(8e-6 * slow, 6)} to ${general(8e-6 * fast, 6)} Mbit/s)`;
    return null;
  }

  /** Numbers of workers for which the methods' numbers are known. */
  const workerCounts = (data) => Object.keys(data.methods[0].workers).map(Number);

  /**
   * Predict the step of DDP alone and of each method; see forecast in gradwire/model/forecast.py.
   *
   * @param data What benchmarks/pages/calculator.py wrote.
   * @param profile Of profileOf, or of the same form.
   * @param setting hosts, ranksPerHost, cores (null: no worker waits for one), bytesPerS (null: unlimited), latencyS
   *   (one way), loss (share of packets; 0 if left out).
   */
  function forecast(data, profile, setting, machine = data.machine) {
    const { constants } = data;
    const { ranksPerHost } = setting;
    const workers = setting.hosts * ranksPerHost;
    if (!workerCounts(data).includes(workers)) throw new RangeError(`no numbers for ${workers} workers`);
    const load = { ranks: ranksPerHost, cores: setting.cores || 2 * ranksPerHost };
    const timeline = scaled(profile.timeline, total(profile.timeline) * stretchOf(load));
    // No message leaves a single host.
    const [latencyS, loss] = setting.hosts === 1 ? [0, 0] : [setting.latencyS, setting.loss || 0];
    const link = { bytesPerS: setting.bytesPerS, latencyS, loss, ranksPerHost };
    const place = { machine, link, load };
    const spread = Math.exp(constants.sigmas * machine.residual);
    const rows = [];
    data.methods.forEach((known, number) => {
      let steps;
      let sent;
      if (known.local) ({ steps, sent } = cycleTime(timeline, known, workers, place, constants));
      else {
        // The first is DDP alone, which scales while it fills the bucket.
        const buckets = bucketsOf(known, timeline, workers, constants).map((b) => (number ? b : bare(b)));
        steps = stepTime(timeline, buckets, workers, place);
        sent = sentBytes(buckets);
      }
      rows.push({
        method: number ? known.spec : constants.nothing,
        world_size: workers,
        step_s: steps.stepS,
        low_s: steps.stepS / spread,
        high_s: steps.stepS * spread,
        floor_s: Math.max(steps.computeS, steps.wireS),
        speedup: (rows.length ? rows[0].step_s : steps.stepS) / steps.stepS,
        sent_bytes: Math.round(sent),
        bottleneck: bottleneck(steps),
        busy_s: steps.busyS,
        wire_s: steps.wireS,
        worker_steps_per_s: workers / steps.stepS,
        exchange_every: known.local ? known.local.every : 1,
        extrapolated: beyond(machine, workers, link, constants.far),
        apart: number ? known.apart : null,
      });
    });
    return rows;
  }

  /**
   * Predict for a model of any size, from a question of profileOf.
   *
   * Beyond LARGEST parameters a smaller model of the same pace is predicted, and its times and bytes are multiplied: a
   * step of k times as many parameters that computes k times as long has k times as many equal buckets.
   */
  function forecastOf(data, question, setting, machine = data.machine) {
    const k = Math.max(1, question.parameters / LARGEST);
    const smaller = { ...question, parameters: Math.round(question.parameters / k), computeS: question.computeS / k };
    const rows = forecast(data, profileOf(smaller), setting, machine);
    const sizes =
      question.parameters > data.constants.far * MEASURED
        ? `a model far larger than those measured (at most ${Math.round(MEASURED / 1e6)} million parameters)`
        : null;
    return rows.map((row) => ({
      ...row,
      step_s: row.step_s * k,
      low_s: row.low_s * k,
      high_s: row.high_s * k,
      floor_s: row.floor_s * k,
      sent_bytes: row.sent_bytes * k,
      worker_steps_per_s: row.worker_steps_per_s / k,
      extrapolated: [row.extrapolated, sizes].filter((reason) => reason).join("; ") || null,
    }));
  }

  /** As Python's format(value, ".3g"). */
  function general(value, digits = 3) {
    if (!Number.isFinite(value)) return String(value);
    const text = value.toExponential(digits - 1);
    const exponent = Number(text.split("e")[1]);
    if (exponent >= digits || exponent < -4) {
      const sign = exponent < 0 ? "-" : "+";
      return `${Number(text.split("e")[0])}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
    }
    return String(Number(text));
  }

  const seconds = (value) => (value < 0.9995 ? `${general(value * 1e3)} ms` : `${general(value)} s`);

  /** The method to use and the reason; see recommend in gradwire/model/forecast.py. */
  function recommend(rows, constants) {
    const candidates = rows.filter((row) => row.apart === null);
    const nothing = candidates.find((row) => row.method === constants.nothing);
    const casts = candidates.filter((row) => constants.casts.includes(row.method));
    const lossy = candidates.filter((row) => ![...constants.casts, ...constants.lossless].includes(row.method));
    let best = nothing;
    for (const group of [casts, lossy]) {
      const fastest = group.reduce((a, b) => (a && a.step_s <= b.step_s ? a : b), null);
      if (fastest && best.step_s / fastest.step_s >= constants.worth) best = fastest;
    }
    if (best === nothing) {
      const others = Math.max(...candidates.filter((row) => row !== nothing).map((row) => row.speedup));
      return {
        method: nothing.method,
        reason:
          `do nothing: DDP alone takes ${seconds(nothing.step_s)} a step, bounded by ${nothing.bottleneck}, and no` +
          ` method makes it ${general(constants.worth, 6)} times as fast (the best: ${others.toFixed(2)})`,
      };
    }
    const sure =
      best.high_s < nothing.low_s ? "" : "; the intervals overlap, so measure before you rely on it";
    return {
      method: best.method,
      reason:
        `use ${best.method}: ${seconds(best.step_s)} a step instead of ${seconds(nothing.step_s)}` +
        ` (${best.speedup.toFixed(1)} times as fast), then bounded by ${best.bottleneck}${sure}`,
    };
  }

  return { LARGEST, MEASURED, profileOf, forecast, forecastOf, recommend, general, seconds, workerCounts };
})();
