// Keeps the page live: fetches it again once a second and puts in what differs.
// Everything works without this file too.
"use strict";
(() => {
  const lost = document.getElementById("lost");
  let timer = 0, under = null;

  async function refresh() {
    clearTimeout(timer);
    under?.abort();
    const call = (under = new AbortController());
    const limit = setTimeout(() => call.abort(), 5000);
    try {
      const answer = await fetch(location.href, { signal: call.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const now of document.querySelectorAll("[data-live]")) {
        const then = next.getElementById(now.id);
        if (then && then.innerHTML !== now.innerHTML) put(now, then);
      }
      lost.hidden = true;
    } catch (e) {
      if (call !== under) return; // a later refresh took over
      lost.hidden = false;
    } finally {
      clearTimeout(limit);
    }
    if (!document.hidden) timer = setTimeout(refresh, 1000);
  }

  // put replaces row by row, so that bars move instead of jumping.
  function put(now, then) {
    if (now.tagName === "TBODY" && now.rows.length === then.rows.length) {
      for (let i = 0; i < now.rows.length; i++) {
        const a = now.rows[i], b = then.rows[i];
        if (a.dataset.key !== b.dataset.key || a.cells.length !== b.cells.length) { a.replaceWith(b.cloneNode(true)); continue; }
        for (let k = 0; k < a.cells.length; k++) {
          const bar = a.cells[k].querySelector("progress"), to = b.cells[k].querySelector("progress");
          if (bar && to) { bar.max = to.max; bar.value = to.value; bar.textContent = to.textContent; }
          else if (a.cells[k].innerHTML !== b.cells[k].innerHTML) a.cells[k].innerHTML = b.cells[k].innerHTML;
        }
      }
      return;
    }
    for (let i = 0; i < Math.max(now.childNodes.length, then.childNodes.length); i++) {
      if (!now.childNodes[i]) { now.append(then.childNodes[i].cloneNode(true)); continue; }
      if (!then.childNodes[i]) { now.childNodes[i--].remove(); continue; }
      const a = now.childNodes[i], b = then.childNodes[i];
      if (a.isEqualNode(b)) continue; // screen readers announce again what is put in again, and a selection ends
      a.replaceWith(b.cloneNode(true));
    }
  }

  const form = document.querySelector("form"), search = form.elements.q;
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const url = new URL(location.href);
      url.searchParams.delete("offset");
      search.value ? url.searchParams.set("q", search.value) : url.searchParams.delete("q");
      history.replaceState(null, "", url);
      refresh();
    }, 150);
  });
  document.addEventListener("keydown", (e) => {
    if (e.key === "/" && document.activeElement !== search && !e.ctrlKey && !e.metaKey && !e.altKey) {
      e.preventDefault();
      search.focus();
    }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  timer = setTimeout(refresh, 1000);
})();
