"use strict";
// Puts one position at a time on the map that the page has, and the orders beside it. No library, no network.
(() => {
  const game = JSON.parse(document.getElementById("game").textContent);
  const at = id => document.getElementById(id);
  const map = at("map"), SIZE = 1000 / 44;
  const FAILED = { bounce: "bounced", cut: "cut", void: "void", dislodged: "dislodged", disband: "disbanded", "no convoy": "no convoy" };
  let now = -1, playing = null, units = new Map();

  // -- drawing: an order is a mark under the units and, where it failed, a cross over them ------------------------------
  const svg = (name, attributes, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const html = (name, attributes, ...inside) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const place = name => game.places[name] || game.places[name.slice(0, 3)];
  const sure = order => (order.length > 2 ? order[2] : null);
  const moves = order => ["-", "R"].includes(order.split(" ")[2]);

  function shape(unit, power, small) {
    const s = SIZE * (small ? 0.8 : 1), w = s * 1.02, h = s * 0.66;
    const body = unit[0] === "A" ? svg("circle", { r: s * 0.72 })
      : svg("path", { d: `M${-w} ${-h}L${w} ${-h}L${w * 0.6} ${h}L${-w * 0.6} ${h}Z` });
    body.style.fill = `var(--p${power})`;
    return [body, svg("text", { y: 7 }, unit[0])];
  }

  function mark(order, power) {
    const words = order[0].split(" "), p = sure(order);
    if (words.length < 3) return []; // a build that is waived
    const own = game.policy.includes(power);
    const group = svg("g", { class: own ? "mark" : "mark theirs" });
    const colour = `var(--p${power})`, thick = SIZE * (0.14 + 0.36 * (p === null ? (own ? 0.5 : 0.15) : p));
    const here = place(words[1]), failed = order[1].some(result => result in FAILED);
    const chance = p === null ? "" : `, ${percent(p)}`;
    group.append(svg("title", {}, `${game.powers[power]}: ${order[0]}${chance}${order[1].length ? ", " + told(order[1]) : ""}`));
    const line = (from, to, dashed) => {
      const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1, dx = (to[0] - from[0]) / length, dy = (to[1] - from[1]) / length;
      const tail = [from[0] + dx * SIZE * 0.8, from[1] + dy * SIZE * 0.8];
      const head = dashed ? 0 : SIZE * 0.55 + thick * 1.2;
      const tip = dashed ? to : [to[0] - dx * Math.min(SIZE * 0.35, length * 0.1), to[1] - dy * Math.min(SIZE * 0.35, length * 0.1)];
      const neck = [tip[0] - dx * head, tip[1] - dy * head], wing = head * 0.62;
      const d = `M${tail}L${neck}`, point = `M${tip}L${neck[0] - dy * wing} ${neck[1] + dx * wing}L${neck[0] + dy * wing} ${neck[1] - dx * wing}Z`;
      group.append(svg("path", { class: "rim", d, "stroke-width": thick + SIZE * 0.22 }));
      if (!dashed) group.append(svg("path", { class: "rim", d: point, "stroke-width": SIZE * 0.22, "stroke-linejoin": "round" }));
      const shaft = svg("path", { d, "stroke-width": thick });
      shaft.style.stroke = colour;
      if (dashed) shaft.setAttribute("stroke-dasharray", `${SIZE * 0.45} ${SIZE * 0.3}`);
      group.append(shaft);
      const end = dashed ? svg("circle", { cx: to[0], cy: to[1], r: SIZE * 0.25 + thick * 0.6 }) : svg("path", { d: point });
      end.style.fill = colour;
      group.append(end);
      return dashed ? [(tail[0] + to[0]) / 2, (tail[1] + to[1]) / 2] : [tip[0] - dx * head * 1.3, tip[1] - dy * head * 1.3];
    };
    let spot = here;
    if (moves(order[0])) spot = line(here, place(words[3]), false);
    else if (words[2] === "S" || words[2] === "C") {
      const start = place(words[4]), end = words.includes("-") ? place(words[6]) : null;
      spot = line(here, end ? [(start[0] + end[0]) / 2, (start[1] + end[1]) / 2] : start, true);
    } else if (words[2] !== "D") {
      const ring = svg("circle", { cx: here[0], cy: here[1], r: SIZE * 1.15, fill: "none", "stroke-width": thick });
      ring.style.stroke = colour;
      if (words[2] === "B") {
        ring.setAttribute("stroke-dasharray", SIZE * 0.35);
        group.append(svg("g", { class: "unit", transform: `translate(${here})` }, ...shape(order[0], power)));
      }
      group.append(ring);
    }
    const cross = words[2] === "D" ? crossAt(here, SIZE * 0.95) : failed ? crossAt(spot, SIZE * 0.36) : null;
    return [group, cross && svg("g", { class: group.getAttribute("class") }, cross)];
  }
  const crossAt = ([x, y], r) => svg("path", { class: "cross", d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}` });

  // -- units that glide where they went -------------------------------------------------------------------------------------
  const standing = ply => [...ply.units.map(([p, unit]) => [`${p} ${unit}`, p, unit, false]), ...ply.out.map(([p, unit]) => [`${p} *${unit}`, p, unit, true])];

  function went(index) { // from the unit's key in this position to its key in the next
    const to = new Map(), ply = game.plies[index], next = game.plies[index + 1];
    if (!next) return to;
    const there = new Set(standing(next).map(([key]) => key));
    const orders = new Map(Object.entries(ply.orders).flatMap(([p, given]) => given.map(order => [`${p} ${order[0].split(" ").slice(0, 2).join(" ")}`, order])));
    for (const [key, p, unit, out] of standing(ply)) {
      const order = orders.get(`${p} ${unit}`);
      const goal = order && moves(order[0]) ? `${p} ${unit[0]} ${order[0].split(" ")[3]}` : null;
      if (goal && !order[1].length && there.has(goal)) to.set(key, goal);
      else if (!out && there.has(`${p} *${unit}`) && order && order[1].includes("dislodged")) to.set(key, `${p} *${unit}`);
      else if (there.has(key)) to.set(key, key);
    }
    return to;
  }

  function showUnits(index, before) {
    let link = new Map();
    if (before >= 0 && Math.abs(index - before) === 1) {
      link = went(Math.min(index, before));
      if (index < before) link = new Map([...link].map(([a, b]) => [b, a]));
    } else for (const key of units.keys()) link.set(key, key);
    const old = units, kept = new Map();
    for (const [key, element] of old) if (link.has(key)) kept.set(link.get(key), element);
    units = new Map();
    for (const [key, p, unit, out] of standing(game.plies[index])) {
      let element = kept.get(key);
      const [x, y] = place(unit.slice(2));
      if (!element) element = svg("g", {}, ...shape(unit, p, out));
      element.setAttribute("class", out ? "unit out" : "unit");
      element.style.transform = out ? `translate(${x + SIZE}px, ${y - SIZE}px) scale(.8)` : `translate(${x}px, ${y}px)`;
      units.set(key, element);
      if (!element.isConnected) at("units").append(element);
    }
    const used = new Set(units.values());
    for (const element of old.values()) if (!used.has(element)) element.remove();
  }

  // -- one position ---------------------------------------------------------------------------------------------------------
  const percent = p => (p < 1e-4 ? "< 0.01 %" : `${(100 * p).toFixed(p >= 0.1 ? 0 : p >= 0.01 ? 1 : 2)} %`);
  const told = results => results.map(result => FAILED[result] || result).join(", ");
  const signed = value => (value > 0 ? "+" : value < 0 ? "−" : "") + String(+Math.abs(value).toFixed(3));
  const counted = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
  const centresOf = (ply, p) => Object.values(ply.centres).filter(owner => owner === p).length;

  function go(index, fromHash) {
    index = Math.max(0, Math.min(game.plies.length - 1, index));
    if (index === now) return;
    const before = now, ply = game.plies[index];
    now = index;
    at("phase").textContent = ply.long + (index === game.plies.length - 1 && !Object.keys(ply.orders).length ? ": the end" : "");
    at("slider").value = index;
    at("slider").setAttribute("aria-valuetext", ply.long);
    for (const ground of map.querySelectorAll(".g.free")) {
      const owner = ply.ground[game.lands.indexOf(ground.dataset.p)];
      ground.style.fill = owner === "." ? "" : `var(--t${owner})`;
    }
    for (const ring of map.querySelectorAll(".sc")) {
      const owner = ply.centres[ring.dataset.c];
      ring.style.fill = owner === undefined ? "" : `var(--p${owner})`;
    }
    map.setAttribute("aria-label", `The board in ${ply.long}`);
    showUnits(index, before);
    showShare(ply);
    showMarks();
    showOrders();
    at("phases").querySelectorAll("a").forEach((link, i) => (i === index ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current")));
    at("back").disabled = at("first").disabled = index === 0;
    at("next").disabled = at("last").disabled = index === game.plies.length - 1;
    if (!fromHash) try { history.replaceState(null, "", `#${index}`); } catch { /* a page that was not saved has no address */ }
  }

  function showShare(ply) {
    const bar = at("share");
    if (!bar.children.length) [...game.powers, ""].forEach((power, p) => {
      const part = html("span", power ? { style: `background: var(--p${p})` } : { class: "nobody" });
      bar.append(part);
    });
    [...bar.children].forEach((part, p) => {
      const count = p < game.powers.length ? centresOf(ply, p) : ply.free.length;
      part.style.flexGrow = count;
      const power = count > 2 && p < game.powers.length ? game.powers[p] : "";
      part.replaceChildren(power.slice(0, 3), html("em", {}, power.slice(3)), count ? `${power && "\u00a0"}${count}` : "");
      part.title = `${game.powers[p] || "nobody"}: ${counted(count, "centre")}`;
    });
  }

  function showMarks() {
    const which = at("which").value, entries = Object.entries(game.plies[now].orders).map(([p, given]) => [Number(p), given]);
    at("marks").replaceChildren();
    at("crosses").replaceChildren();
    map.classList.remove("picked");
    if (which === "none") return;
    entries.sort(([a], [b]) => game.policy.includes(a) - game.policy.includes(b));
    for (const [p, given] of entries) {
      if (which === "policy" && !game.policy.includes(p)) continue;
      given.forEach((order, i) => {
        mark(order, p).forEach((drawn, layer) => {
          if (!drawn) return;
          drawn.dataset.order = `${p}-${i}`;
          at(layer ? "crosses" : "marks").append(drawn);
        });
      });
    }
  }

  function pick(name) {
    map.classList.toggle("picked", Boolean(name));
    map.querySelectorAll(".mark").forEach(element => element.classList.toggle("chosen", element.dataset.order === name));
    at("orders").querySelectorAll("tr").forEach(row => row.classList.toggle("chosen", Boolean(name) && row.dataset.order === name));
  }

  function showOrders() {
    const ply = game.plies[now], list = at("orders");
    list.replaceChildren();
    const ranked = game.powers.map((_, p) => p).filter(p => ply.orders[p] || game.policy.includes(p));
    ranked.sort((a, b) => game.policy.includes(b) - game.policy.includes(a) || a - b);
    for (const p of ranked) list.append(card(ply, p));
    if (!list.children.length) list.append(html("p", { class: "quiet" }, "Nothing was ordered here."));
    list.scrollTop = 0;
  }

  function card(ply, p) {
    const own = game.policy.includes(p), decision = ply.decisions[p], given = ply.orders[p] || [];
    const standingNow = ply.units.filter(([power]) => power === p).length;
    const box = html("section", { class: "power", style: `--own: var(--p${p})` });
    box.append(html("h2", {}, game.powers[p], html("span", { class: "quiet" },
      `${counted(centresOf(ply, p), "centre")}, ${counted(standingNow, "unit")} · ${own ? "policy" : game.opponents}`)));
    if (decision && decision.thought) box.append(thought(decision.thought));
    if (given.length) {
      const body = html("tbody", {});
      given.forEach((order, i) => {
        const p_ = sure(order), row = html("tr", { tabindex: "0", "data-order": `${p}-${i}` });
        row.append(html("td", { class: "order" }, order[0]), html("td", { class: "result" }, told(order[1])));
        if (decision) row.append(html("td", { class: "chance" }, ...(p_ === null ? [] : [track(p_, order[3])])));
        for (const [event, name] of [["mouseenter", row.dataset.order], ["mouseleave", ""], ["focus", row.dataset.order], ["blur", ""]]) row.addEventListener(event, () => pick(name));
        body.append(row);
      });
      box.append(html("table", {}, body));
    }
    if (own) box.append(facts(ply, p, decision, given));
    return box;
  }

  function track(p, choices) {
    const bar = html("i", { style: `width: ${(58 * p).toFixed(1)}%` });
    return html("div", { class: "track", title: choices ? `${counted(choices, "token")} of it had a legal rival` : "forced by the orders before it" }, bar, percent(p));
  }

  const thought = ({ about, text }) => html("figure", { class: "thought" },
    text.trim() && html("blockquote", {}, text.trim()), html("figcaption", { class: "quiet" }, about));

  function facts(ply, p, decision, given) {
    const box = html("div", { class: "facts" });
    if (!decision) {
      const last = now === game.plies.length - 1;
      box.append(html("p", { class: "quiet" }, given.length ? "Not asked: it had one legal order set." : last ? "The game ends here." : "Nothing to order."));
      return box;
    }
    const lag = decision.used.map(([step, behind]) => `step ${step} trained on it at lag ${behind}`);
    box.append(html("p", {}, `All together ${percent(Math.exp(decision.logprob))}${decision.thought ? ", given the thought" : ""}. Drawn by ${decision.version ? `version ${decision.version}` : "the base"}; ${lag.join("; ") || "no step trained on it"}.`));
    const parts = Object.entries(decision.components).map(([name, value]) => `${name.replaceAll("_", " ")} ${signed(value)}`).join(", ");
    box.append(html("p", {}, `Return ${signed(decision.return) || "0"}. Until its next decision: ${parts || "nothing changed"}.`));
    if (decision.status !== "complete") box.append(html("p", {}, `The fork failed later: ${decision.reason}.`));
    if (!game.odds) box.append(html("p", { class: "quiet" }, "The run's tokenizer is gone from the machine that wrote this page, so single orders have no probability."));
    const next = game.plies.findIndex((later, i) => i > now && later.decisions[p]);
    if (next > 0) {
      const link = html("a", { href: `#${next}` }, `its next decision: ${game.plies[next].short} →`);
      box.append(html("p", {}, link));
    }
    box.append(html("details", {}, html("summary", {}, "every token of it"), html("code", {}, game.ask.replace("ID", decision.id))));
    return box;
  }

  // -- moving through the game ------------------------------------------------------------------------------------------------
  function play(on) {
    clearInterval(playing);
    playing = on ? setInterval(() => (now < game.plies.length - 1 ? go(now + 1) : play(false)), 1800) : null;
    at("play").textContent = on ? "⏸ pause" : "▶ play";
    at("play").setAttribute("aria-label", on ? "Pause" : "Play");
  }
  const toggle = () => {
    if (playing === null && now === game.plies.length - 1) go(0);
    play(playing === null);
  };
  const step = by => { play(false); go(now + by); };
  at("next").onclick = () => step(1);
  at("back").onclick = () => step(-1);
  at("first").onclick = () => step(-game.plies.length);
  at("last").onclick = () => step(game.plies.length);
  at("play").onclick = toggle;
  at("slider").oninput = event => { play(false); go(Number(event.target.value)); };
  at("which").onchange = showMarks;
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const keys = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-game.plies.length), End: () => step(game.plies.length) };
    if (event.key === " " && event.target.tagName !== "BUTTON") keys[" "] = toggle;
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  game.plies.forEach((ply, i) => at("phases").append(html("a", { href: `#${i}`, class: Object.keys(ply.decisions).length ? "asked" : "" }, ply.short)));
  const fromHash = () => { const wanted = Number(location.hash.slice(1)); go(Number.isInteger(wanted) ? wanted : 0, true); };
  addEventListener("hashchange", fromHash);
  fromHash();
})();
