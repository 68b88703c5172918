// One game: shows its positions, takes a person's orders, and asks the server for all else. The server checks everything again.
(() => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const game = { ...page, phases: [] };
  const { at, html, svg, map, place, mark, showUnits, showGround, showShare, percent, told, counted, centresOf, whatIf } = boardOf(game);
  const SIZE = 1000 / 58, still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let state = { revision: -1 }, now = -1, timer = null, asking = false, auto = false; // auto: a watched game plays on by itself
  let mine = null, drafts = {}, picked = null, clicks = [], kind = ""; // kind: of the order, S or C, after the first of its clicks

  // -- talking to the server --------------------------------------------------------------------------------------------------
  async function ask(path, body) {
    const answer = await fetch(path, {
      method: body ? "POST" : "GET", body: body && JSON.stringify(body),
      headers: { "x-entente-key": page.key, ...(body ? { "content-type": "application/json" } : {}) },
    });
    return answer.status === 204 ? null : { ok: answer.ok, ...(await answer.json()) };
  }
  async function change(path, body) {
    asking = true;
    say("");
    showOwn();
    try {
      const answer = await ask(path, { ...body, revision: state.revision });
      const failed = answer.error || answer.sentence;
      if (failed) say(failed);
      take(failed ? answer.state : answer);
      return answer;
    } catch { say("The server does not answer: is `entente play` still running? What was ordered is stored."); return null; }
    finally { asking = false; showOwn(); showStatus(); }
  }
  async function watch() {
    for (;;) {
      try { take(await ask(`game?seen=${state.revision}`)); if (at("error").dataset.gone) say(""); }
      catch { say("The server does not answer: is `entente play` still running? What was ordered is stored.", true); await new Promise(done => setTimeout(done, 2000)); }
    }
  }
  function say(text, gone) {
    at("error").textContent = text;
    at("error").hidden = !text;
    if (gone) at("error").dataset.gone = "1"; else delete at("error").dataset.gone;
  }

  // -- a new state: the phases that were played pass by, then the position now ------------------------------------------------
  function take(next) {
    if (!next || next.revision <= state.revision) return;
    const before = state, came = next.phases.length - (before.phases ? before.phases.length : next.phases.length);
    const follows = timer !== null || now === game.phases.length - 1;
    const from = timer === null && before.phases ? before.phases.length - 1 : now; // a phase that is passing by is shown again
    // Also where as many phases were played again since: a window that slept has seen neither the undo nor what came after it.
    const undone = before.phases && before.phases.slice(0, -1).some((phase, i) => JSON.stringify(phase) !== JSON.stringify(next.phases[i]));
    state = next;
    game.phases = next.phases;
    if (came || undone || !before.phases) { drafts = {}; unpick(); }
    if (!state.waits.includes(mine)) mine = state.waits.length ? state.waits[0] : null;
    showPhases();
    if (came || undone) stay();
    if (undone || !before.phases) { now = -1; go(state.phases.length - 1); }
    else if (follows && came > 0) pass(from);
    else refresh();
  }
  function pass(from) { // shows what was ordered where it was, then goes on
    now = from;
    refresh();
    timer = from < state.phases.length - 1 ? setTimeout(() => { go(from + 1); pass(from + 1); }, still ? 0 : 1300) : null;
  }
  function stay() {
    clearTimeout(timer);
    timer = null;
  }
  function go(index) {
    const before = now;
    now = Math.max(0, Math.min(game.phases.length - 1, index));
    if (now !== before) showUnits(now, before);
    refresh();
  }
  const isNow = () => now === game.phases.length - 1;
  const entering = () => isNow() && mine !== null && !state.deciding && !asking;

  // -- what is shown ------------------------------------------------------------------------------------------------------------
  function refresh() {
    const phase = game.phases[now];
    at("phase").textContent = phase.long + (state.over && isNow() ? ": the end" : "");
    showGround(phase);
    showShare(phase);
    showMarks();
    showStatus();
    showOwn();
    showOrders();
    at("phases").querySelectorAll("a").forEach((link, i) => (i === now ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current")));
    at("back").disabled = at("first").disabled = now === 0;
    at("next").disabled = at("last").disabled = isNow();
    at("undo").hidden = isNow() || state.deciding;
    map.classList.toggle("entry", entering());
  }
  function showPhases() {
    at("phases").replaceChildren(...game.phases.map((phase, i) => {
      const link = html("a", { href: `#${i}` }, phase.short);
      link.onclick = event => { event.preventDefault(); auto = false; stay(); go(i); };
      return link;
    }));
  }
  const list = names => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]);
  function showStatus() {
    const name = p => game.powers[p], phase = game.phases.at(-1);
    const most = Math.max(...game.powers.map((_, p) => centresOf(phase, p)));
    const first = game.powers.map((_, p) => p).filter(p => centresOf(phase, p) === most);
    at("how").textContent = state.over ? "◀ and ▶ or the arrow keys step through the game; it can be played on from an earlier position."
      : state.watched ? "◀ and ▶ or the arrow keys step through what was played."
      : "Click a unit of yours, then where it goes: an empty province to move, a unit to support or convoy it, the unit again to hold. Esc gives up a click.";
    at("status").textContent = state.over ? `The game is over: ${list(first.map(name))} with ${counted(most, "centre")}.`
      : state.deciding ? `The ${state.watched ? "players" : "others"} decide …`
      : state.watched ? (auto ? "The game plays on by itself." : "You watch: play the next phase, or let the game play on by itself.")
      : state.waits.length ? `${list(state.waits.map(name))}: your orders, please.${state.given.length ? ` ${list(state.given.map(name))} has ordered.` : ""}`
      : "Nobody here has anything to order: play the next phase.";
  }
  function showMarks() {
    at("marks").replaceChildren();
    at("crosses").replaceChildren();
    at("targets").replaceChildren();
    const draw = (order, p) => mark(order, p).forEach((drawn, layer) => drawn && at(layer ? "crosses" : "marks").append(drawn));
    for (const [p, given] of Object.entries(game.phases[now].orders)) for (const order of given) draw(order, Number(p));
    if (!entering()) return;
    for (const order of chosen()) draw([order, []], mine);
    if (picked === null) return;
    const here = place(where(state.legal[mine].sites[picked]));
    at("targets").append(svg("circle", { class: "picked-unit", cx: here[0], cy: here[1], r: SIZE * 1.2 }));
    for (const name of new Set(candidates().map(order => path(order)[clicks.length]))) {
      const [x, y] = place(name);
      at("targets").append(svg("circle", { class: "target", cx: x, cy: y, r: SIZE * 0.5 }));
    }
  }

  // -- orders by clicks: an order is a path of one or two provinces after its unit ----------------------------------------------
  const where = site => site.split(" ").at(-1);
  const land = name => name.slice(0, 3);
  function path(order) {
    const words = order.split(" ");
    if (words[2] === "-" || words[2] === "R") return [land(words[3])];
    if (words[2] === "S" || words[2] === "C") return [land(words[4]), land(words[6] || words[4])];
    return [land(words[1])];
  }
  const legal = () => state.legal[mine];
  const picks = () => ["build", "disband"].includes(legal().kind);
  const draft = () => (drafts[mine] ??= legal().sites.map(() => ""));
  const chosen = () => (mine === null ? [] : draft().filter(Boolean));
  const candidates = () => legal().options[picked].filter(order => clicks.every((click, i) => path(order)[i] === click) && (!kind || order.split(" ")[2] === kind));
  function pick(site) { picked = site; clicks = []; kind = ""; showMarks(); }
  function unpick() { picked = null; clicks = []; kind = ""; at("choice").hidden = true; }
  function set(site, order) {
    draft()[site] = order;
    unpick();
    showMarks();
    showOwn();
  }
  const IN_WORDS = { H: "hold", D: "disband", B: "build" };
  function inWords(order) {
    const words = order.split(" ");
    if (words[2] === "-") return `move to ${words[3]}${words[4] ? " by convoy" : ""}`;
    if (words[2] === "R") return `retreat to ${words[3]}`;
    if (words[2] === "S") return words[5] ? `support ${words[3]} ${words[4]} to ${words[6]}` : `support ${words[3]} ${words[4]} where it is`;
    if (words[2] === "C") return `convoy ${words[3]} ${words[4]} to ${words[6]}`;
    if (words[2] === "B") return `build ${words[0] === "A" ? "an army" : "a fleet"} in ${words[1]}`;
    return IN_WORDS[words[2]] || order;
  }
  function choose(entries, event) {
    const box = at("choice"), around = map.parentElement.getBoundingClientRect();
    box.replaceChildren(...entries.map(([text, act]) => {
      const button = html("button", { role: "menuitem" }, text);
      button.onclick = () => { box.hidden = true; act(); };
      return button;
    }));
    box.hidden = false;
    box.style.left = `${Math.max(0, Math.min(event.clientX - around.left, around.width - box.offsetWidth - 8))}px`;
    box.style.top = `${event.clientY - around.top + 8}px`;
    box.firstChild.focus();
  }
  map.addEventListener("click", event => {
    const ground = event.target.closest("[data-p]");
    at("choice").hidden = true;
    if (!ground || !entering()) return;
    const name = ground.dataset.p, { sites, options } = legal(), own = sites.findIndex(site => land(where(site)) === name);
    if (picks()) {
      if (own < 0) return;
      if (legal().kind === "disband") return set(own, draft()[own] ? "" : options[own][0]);
      return choose([...options[own].map(order => [inWords(order), () => set(own, order)]), ["build nothing here", () => set(own, "")]], event);
    }
    if (picked === null) { if (own >= 0) pick(own); return; }
    const site = picked, found = candidates().filter(order => path(order)[clicks.length] === name);
    const ended = found.filter(order => path(order).length === clicks.length + 1), on = found.filter(order => !ended.includes(order));
    const entries = ended.map(order => [inWords(order), () => set(site, order)]);
    const further = of => () => { clicks = [name]; kind = of; showMarks(); };
    for (const of of ["S", "C"]) {
      const some = on.filter(order => order.split(" ")[2] === of), one = some[0] && some[0].split(" ").slice(3, 5).join(" ");
      if (some.length === 1) entries.push([inWords(some[0]), () => set(site, some[0])]);
      else if (some.length) entries.push([`${of === "S" ? "support" : "convoy"} ${one} …`, further(of)]);
    }
    if (own >= 0 && own !== picked) entries.push([`order ${sites[own]} instead`, () => pick(own)]);
    if (!entries.length) { unpick(); showMarks(); }
    else if (entries.length === 1) entries[0][1]();
    else choose(entries, event);
  });
  // -- the list of one's own orders: the same, by keyboard --------------------------------------------------------------------
  function showOwn() {
    const box = at("own"), controls = () => [...box.querySelectorAll("select, button")], held = controls().indexOf(document.activeElement);
    const fill = (...inside) => { // what had the focus keeps it, for those who play by keyboard
      box.replaceChildren(...inside);
      if (held >= 0) controls()[held]?.focus();
    };
    if (state.revision < 0) return;
    if ((!isNow() && !auto) || (mine === null && (state.over || (state.deciding && !state.watched)))) return fill();
    if (mine === null) {
      const button = html("button", { class: "main" }, "play the next phase"), on = html("button", {}, auto ? "pause" : "play on by itself");
      button.disabled = asking || state.deciding || auto;
      button.onclick = () => change("next", {});
      on.onclick = () => { auto = !auto; showOwn(); showStatus(); if (auto) playOn(); };
      return fill(html("div", { class: "actions" }, button, ...(state.watched ? [on] : [])));
    }
    const { sites, options, kind: phase, picks: most } = legal(), own = draft(), body = html("tbody", {});
    const rule = { build: `Build up to ${most}.`, disband: `Disband ${most}.`, retreat: "Retreat or disband.", movement: "" }[phase];
    sites.forEach((site, i) => {
      const select = html("select", { "aria-label": `Order of ${site}` });
      select.append(html("option", { value: "" }, phase === "movement" ? "hold" : phase === "retreat" ? "disband" : "nothing"));
      for (const order of options[i]) {
        const rest = order.split(" ").slice(2).join(" ");
        if (rest === "H" || (rest === "D" && phase === "retreat")) continue; // what happens without an order
        select.append(html("option", { value: order }, ["build", "disband"].includes(phase) ? inWords(order) : rest));
      }
      select.value = [...select.options].some(option => option.value === own[i]) ? own[i] : "";
      select.disabled = asking || state.deciding;
      select.onchange = () => set(i, select.value);
      body.append(html("tr", {}, html("td", {}, site), html("td", {}, select)));
    });
    const card = html("section", { class: "power" });
    card.style.setProperty("--own", `var(--p${mine})`);
    card.append(html("h2", {}, `Your orders: ${game.powers[mine]}`, html("span", { class: "quiet" }, rule)));
    if (state.waits.length > 1) {
      const who = html("select", { "aria-label": "Power to order for" }, ...state.waits.map(p => html("option", { value: p }, game.powers[p])));
      who.value = mine;
      who.onchange = () => { mine = Number(who.value); unpick(); showMarks(); showOwn(); };
      card.append(who);
    }
    card.append(html("table", {}, body));
    const send = html("button", { class: "main" }, asking || state.deciding ? "the others decide …" : "send the orders");
    send.disabled = asking || state.deciding;
    send.onclick = () => change("orders", { power: page.powers[mine].toUpperCase(), orders: chosen() });
    const by = html("select", { "aria-label": "Who gives the hint" }, ...page.players.map(name => html("option", {}, name)));
    by.value = hinter;
    by.onchange = () => { hinter = by.value; };
    const ask_ = html("button", {}, hinting ? "asking …" : "hint by");
    ask_.disabled = send.disabled || hinting;
    ask_.onclick = () => hint(mine);
    card.append(html("div", { class: "actions" }, send, ask_, by));
    fill(card);
  }
  let playing = false;
  async function playOn() { // one phase after another; each is shown as it passes by before the next one is played
    if (playing) return;
    playing = true;
    while (auto && state.watched && !state.over) {
      if (isNow() && timer === null && !state.deciding && !asking) {
        const answer = await change("next", {});
        if (!answer || answer.error || answer.sentence) break;
      }
      await new Promise(done => setTimeout(done, 300));
    }
    playing = auto = false;
    showOwn();
    showStatus();
  }
  let hinter = page.players[0], hinting = false;
  async function hint(power) {
    hinting = true; // a search takes seconds
    showOwn();
    const answer = await ask("hint", { power: page.powers[power].toUpperCase(), player: hinter, revision: state.revision }).catch(() => null);
    hinting = false;
    showOwn();
    if (!answer || answer.error) return say(answer ? answer.error : "The server does not answer.");
    if (power !== mine) return;
    drafts[mine] = legal().options.map(options => answer.orders.find(order => options.includes(order)) || "");
    unpick();
    showMarks();
    showOwn();
  }

  // -- what everybody ordered ---------------------------------------------------------------------------------------------------
  function showOrders() {
    const index = isNow() && now > 0 ? now - 1 : now, phase = game.phases[index], entries = Object.entries(phase.orders);
    const box = at("orders");
    if (!entries.length) return box.replaceChildren(...(isNow() ? who(phase) : []));
    box.replaceChildren(html("h3", {}, index === now ? "Orders" : `What happened in ${phase.long}`), ...entries.map(([p, given]) => {
      const card = html("section", { class: "power" }), body = html("tbody", {});
      card.style.setProperty("--own", `var(--p${p})`);
      const sure = phase.sure[p] === undefined ? "" : ` · ${percent(phase.sure[p])} sure of this set`;
      card.append(html("h2", {}, game.powers[p], html("span", { class: "quiet" }, `${page.seats[p] === "human" ? "you" : page.seats[p]}${sure}`)));
      for (const [order, results] of given) body.append(html("tr", {}, html("td", { class: "order" }, order), html("td", { class: "result" }, told(results))));
      card.append(html("table", {}, body));
      if (phase.tried[p]) card.append(tried(phase.tried[p], given.map(([order]) => order)));
      if (page.file) card.append(whatIf(page.file, phase, p, given));
      return card;
    }));
  }
  function tried(proposals, played) { // what a search tried, best value first; the set that was played is marked
    const body = html("tbody", {}), same = orders => orders.every((order, i) => order === played[i]);
    for (const { orders, value, playouts, sure } of proposals) {
      const row = html("tr", same(orders) ? { class: "played" } : {}, html("td", {}, value.toFixed(2)), html("td", {}, String(playouts)),
        html("td", {}, sure === null ? "–" : percent(sure)), html("td", {}, orders.join("; ")));
      body.append(row);
    }
    const head = html("tr", {}, ...["value", "playouts", "sure", "orders"].map(name => html("th", { scope: "col" }, name)));
    return html("details", { class: "tried" }, html("summary", {}, `the search tried ${counted(proposals.length, "order set")}`), html("table", {}, html("thead", {}, head), body));
  }
  const who = () => [html("h3", {}, "Who plays"), ...page.seats.map((seat, p) => {
    const card = html("section", { class: "power" });
    card.style.setProperty("--own", `var(--p${p})`);
    card.append(html("h2", {}, game.powers[p], html("span", { class: "quiet" }, seat === "human" ? "you" : seat)));
    return card;
  })];

  // -- moving through the game --------------------------------------------------------------------------------------------------
  const step = to => { auto = false; stay(); unpick(); go(to); };
  at("first").onclick = () => step(0);
  at("back").onclick = () => step(now - 1);
  at("next").onclick = () => step(now + 1);
  at("last").onclick = () => step(game.phases.length - 1);
  at("undo").onclick = () => { auto = false; change("undo", { turn: now }); };
  at("save").href = `saved?key=${encodeURIComponent(page.key)}`;
  at("export").href = `recorded?key=${encodeURIComponent(page.key)}`;
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") { unpick(); showMarks(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "BUTTON"].includes(event.target.tagName)) return;
    const keys = { ArrowRight: () => step(now + 1), ArrowLeft: () => step(now - 1), Home: () => step(0), End: () => step(game.phases.length - 1) };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  take(JSON.parse(at("state").textContent));
  watch();
})();
