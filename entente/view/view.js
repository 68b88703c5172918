"use strict";
// Asks for the page again every few seconds, and puts in the parts that changed. A page that did not change costs the server little.
(() => {
  const lost = document.getElementById("lost"), seen = new Map();
  let tag = null, wait = Number(document.querySelector("main").dataset.every || 0);
  for (const part of document.querySelectorAll("[data-part]")) seen.set(part, part.innerHTML);

  function take(text) {
    const next = new DOMParser().parseFromString(text.replace(/<style[^]*?<\/style>/, ""), "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const other = next.querySelector(`[data-part="${part.dataset.part}"]`);
      if (!other || other.innerHTML === seen.get(part)) continue;
      if (part.contains(document.activeElement) && document.activeElement.matches("input:not([type=checkbox]), textarea, select")) {
        tag = null; // its change is still to come
        continue;
      }
      const open = [...part.querySelectorAll("details")].map(each => each.open), focus = document.activeElement?.getAttribute("href");
      const ticked = [...part.querySelectorAll("input:checked")].map(each => each.value);
      seen.set(part, other.innerHTML);
      part.innerHTML = other.innerHTML;
      part.querySelectorAll("details").forEach((each, i) => { each.open = open[i]; });
      part.querySelectorAll("[type=checkbox]").forEach(each => { each.checked = ticked.includes(each.value); });
      if (focus && document.activeElement === document.body) part.querySelector(`a[href="${CSS.escape(focus)}"]`)?.focus();
    }
    document.title = next.title;
    wait = Number(next.querySelector("main").dataset.every || 0);
  }

  async function ask() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { headers: tag ? { "if-none-match": tag } : {} });
      lost.hidden = answer.ok || answer.status === 304;
      if (answer.status === 304) return;
      tag = answer.headers.get("etag");
      if (answer.ok) take(await answer.text());
    } catch { lost.hidden = false; }
  }
  (async () => { while (wait) { await new Promise(done => setTimeout(done, wait)); await ask(); } })();
})();
