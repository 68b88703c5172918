"use strict";
// Draws units, orders and shares on the map that a page has. The replay and the board to play at share it. No library, no network.
// `game` has `powers`, `policy` (powers whose marks are strong), `places`, `lands` and `phases`; phases may be added later.
const boardOf = game => {
  const at = id => document.getElementById(id);
  const map = at("map"), SIZE = 1000 / 58;
  const FAILED = { bounce: "bounced", cut: "cut", disrupted: "disrupted", void: "void", dislodged: "dislodged", disband: "disbanded", "no convoy": "no convoy" };
  let units = new Map();

  // -- drawing: an order is a mark under the units and, where it failed, a cross over them ------------------------------
  const svg = (name, attributes, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const html = (name, attributes, ...inside) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) key === "style" ? (element.style.cssText = value) : element.setAttribute(key, value);
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
    return [body, svg("text", { y: 5.5 }, unit[0])];
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
  const standing = phase => [...phase.units.map(([p, unit]) => [`${p} ${unit}`, p, unit, false]), ...phase.out.map(([p, unit]) => [`${p} *${unit}`, p, unit, true])];

  function went(index) { // from the unit's key in this position to its key in the next
    const to = new Map(), phase = game.phases[index], next = game.phases[index + 1];
    if (!next) return to;
    const there = new Set(standing(next).map(([key]) => key));
    const orders = new Map(Object.entries(phase.orders).flatMap(([p, given]) => given.map(order => [`${p} ${order[0].split(" ").slice(0, 2).join(" ")}`, order])));
    for (const [key, p, unit, out] of standing(phase)) {
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
    for (const [key, p, unit, out] of standing(game.phases[index])) {
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

  // -- ground, owners and shares --------------------------------------------------------------------------------------------
  const percent = p => (p < 1e-4 ? "< 0.01 %" : `${(100 * p).toFixed(p >= 0.1 ? 0 : p >= 0.01 ? 1 : 2)} %`);
  const told = results => results.map(result => FAILED[result] || result).join(", ");
  const signed = value => (value > 0 ? "+" : value < 0 ? "−" : "") + String(+Math.abs(value).toFixed(3));
  const counted = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
  const centresOf = (phase, p) => Object.values(phase.centres).filter(owner => owner === p).length;

  function showGround(phase) {
    for (const ground of map.querySelectorAll(".g.free")) {
      const owner = phase.ground[game.lands.indexOf(ground.dataset.p)];
      ground.style.fill = owner === "." ? "" : `var(--t${owner})`;
    }
    for (const ring of map.querySelectorAll(".sc")) {
      const owner = phase.centres[ring.dataset.c];
      ring.style.fill = owner === undefined ? "" : `var(--p${owner})`;
    }
    map.setAttribute("aria-label", `The board in ${phase.long}`);
  }

  function showShare(phase) {
    const bar = at("share");
    if (!bar.children.length) [...game.powers, ""].forEach((power, p) => {
      const part = html("span", power ? {} : { class: "nobody" });
      if (power) part.style.background = `var(--p${p})`;
      bar.append(part);
    });
    [...bar.children].forEach((part, p) => {
      const count = p < game.powers.length ? centresOf(phase, p) : phase.free.length;
      part.style.flexGrow = count;
      const power = count > 2 && p < game.powers.length ? game.powers[p] : "";
      part.replaceChildren(power.slice(0, 3), html("em", {}, power.slice(3)), count ? `${power && "\u00a0"}${count}` : "");
      part.title = `${game.powers[p] || "nobody"}: ${counted(count, "centre")}`;
    });
  }

  // The command that continues this phase with other orders of a power; `named`: how it names the game.
  const whatIf = (named, phase, power, given) => html("details", {}, html("summary", {}, "what if it had ordered otherwise"), html("code", {},
    `entente runs what-if --phase ${phase.short} --power ${game.powers[power].toLowerCase()} --orders "${given.map(([order]) => order).join(", ")}" --game ${named}`));

  return { at, html, svg, map, place, mark, sure, moves, showUnits, showGround, showShare, percent, told, signed, counted, centresOf, whatIf };
};
