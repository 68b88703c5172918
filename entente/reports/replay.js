"use strict";
// Puts one position at a time on the map that the page has, and the orders beside it.
(() => {
  const game = JSON.parse(document.getElementById("game").textContent);
  const { at, html, map, mark, sure, showUnits, showGround, showShare, percent, told, signed, counted, centresOf, whatIf } = boardOf(game);
  let now = -1, playing = null;

  // -- one position ---------------------------------------------------------------------------------------------------------
  function go(index, fromHash) {
    index = Math.max(0, Math.min(game.phases.length - 1, index));
    if (index === now) return;
    const before = now, phase = game.phases[index];
    now = index;
    at("phase").textContent = phase.long + (index === game.phases.length - 1 && !Object.keys(phase.orders).length ? ": the end" : "");
    at("slider").value = index;
    at("slider").setAttribute("aria-valuetext", phase.long);
    showGround(phase);
    showUnits(index, before);
    showShare(phase);
    showMarks();
    showOrders();
    at("phases").querySelectorAll("a").forEach((link, i) => (i === index ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current")));
    at("back").disabled = at("first").disabled = index === 0;
    at("next").disabled = at("last").disabled = index === game.phases.length - 1;
    if (!fromHash) try { history.replaceState(null, "", `#${index}`); } catch { /* a page that was not saved has no address */ }
  }

  function showMarks() {
    const which = at("which").value, entries = Object.entries(game.phases[now].orders).map(([p, given]) => [Number(p), given]);
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
    const phase = game.phases[now], list = at("orders");
    list.replaceChildren();
    const ranked = game.powers.map((_, p) => p).filter(p => phase.orders[p] || game.policy.includes(p));
    ranked.sort((a, b) => game.policy.includes(b) - game.policy.includes(a) || a - b);
    for (const p of ranked) list.append(card(phase, p));
    if (!list.children.length) list.append(html("p", { class: "quiet" }, "Nothing was ordered here."));
    list.scrollTop = 0;
  }

  function card(phase, p) {
    const own = game.policy.includes(p), decision = phase.decisions[p], given = phase.orders[p] || [];
    const standingNow = phase.units.filter(([power]) => power === p).length;
    const box = html("section", { class: "power", style: `--own: var(--p${p})` });
    box.append(html("h2", {}, game.powers[p], html("span", { class: "quiet" },
      `${counted(centresOf(phase, p), "centre")}, ${counted(standingNow, "unit")} · ${own ? "policy" : game.opponents}`)));
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
    if (own) box.append(facts(phase, p, decision, given));
    if (given.length) box.append(game.links ? link("what if it had ordered otherwise", `${game.links.what_if}&${new URLSearchParams(
      { phase: phase.short, power: game.powers[p].toLowerCase(), orders: given.map(([order]) => order).join(", ") })}#what-if`) : whatIf(game.what_if, phase, p, given));
    return box;
  }

  function track(p, choices) {
    const bar = html("i", { style: `width: ${(58 * p).toFixed(1)}%` });
    return html("div", { class: "track", title: choices ? `${counted(choices, "token")} of it had a legal rival` : "forced by the orders before it" }, bar, percent(p));
  }

  const link = (words, href) => html("p", {}, html("a", { href }, words));
  const thought = ({ about, text }) => html("figure", { class: "thought" },
    text.trim() && html("blockquote", {}, text.trim()), html("figcaption", { class: "quiet" }, about));

  function facts(phase, p, decision, given) {
    const box = html("div", { class: "facts" });
    if (!decision) {
      const last = now === game.phases.length - 1;
      box.append(html("p", { class: "quiet" }, given.length ? "Not asked: it had one legal order set." : last ? "The game ends here." : "Nothing to order."));
      return box;
    }
    const lag = decision.used.map(([step, behind]) => `step ${step} trained on it at lag ${behind}`);
    box.append(html("p", {}, `All together ${percent(Math.exp(decision.logprob))}${decision.thought ? ", given the thought" : ""}. Sampled by ${decision.policy_version ? `version ${decision.policy_version}` : "the base"}; ${lag.join("; ") || "no step trained on it"}.`));
    const parts = Object.entries(decision.components).map(([name, value]) => `${name.replaceAll("_", " ")} ${signed(value)}`).join(", ");
    box.append(html("p", {}, `Return ${signed(decision.return) || "0"}. Until its next decision: ${parts || "nothing changed"}.`));
    if (decision.status !== "complete") box.append(html("p", {}, `The fork failed later: ${decision.reason}.`));
    if (!game.odds) box.append(html("p", { class: "quiet" }, "The run's tokenizer is gone from the machine that wrote this page, so single orders have no probability."));
    const next = game.phases.findIndex((later, i) => i > now && later.decisions[p]);
    if (next > 0) {
      const link = html("a", { href: `#${next}` }, `its next decision: ${game.phases[next].short} →`);
      box.append(html("p", {}, link));
    }
    box.append(game.links ? link("every token of it", game.links.decision.replace("ID", decision.decision_id))
      : html("details", {}, html("summary", {}, "every token of it"), html("code", {}, game.ask.replace("ID", decision.decision_id))));
    return box;
  }

  // -- moving through the game ------------------------------------------------------------------------------------------------
  function play(on) {
    clearInterval(playing);
    playing = on ? setInterval(() => (now < game.phases.length - 1 ? go(now + 1) : play(false)), 1800) : null;
    at("play").textContent = on ? "⏸ pause" : "▶ play";
    at("play").setAttribute("aria-label", on ? "Pause" : "Play");
  }
  const toggle = () => {
    if (playing === null && now === game.phases.length - 1) go(0);
    play(playing === null);
  };
  const step = by => { play(false); go(now + by); };
  at("next").onclick = () => step(1);
  at("back").onclick = () => step(-1);
  at("first").onclick = () => step(-game.phases.length);
  at("last").onclick = () => step(game.phases.length);
  at("play").onclick = toggle;
  at("slider").oninput = event => { play(false); go(Number(event.target.value)); };
  at("which").onchange = showMarks;
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, textarea, input:not([type=range])")) return; // these keys are its own
    const keys = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-game.phases.length), End: () => step(game.phases.length) };
    if (event.key === " " && !event.target.matches("button, summary")) keys[" "] = toggle;
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  game.phases.forEach((phase, i) => at("phases").append(html("a", { href: `#${i}`, class: Object.keys(phase.decisions).length ? "asked" : "" }, phase.short)));
  const fromHash = () => { const wanted = Number(location.hash.slice(1)); go(Number.isInteger(wanted) ? wanted : 0, true); };
  addEventListener("hashchange", fromHash);
  fromHash();
})();
