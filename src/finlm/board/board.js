"use strict";
// A page that may change is asked for again; sections that differ are put in place, charts are handed over, and what is
// open, chosen or in focus stays so. The forms of a recipe and of the chat answer in place.
(() => {
  const main = document.getElementById("content"), said = document.getElementById("said");
  const csrf = document.body.dataset.csrf || "";
  const language = document.getElementById("language"), here = new URL(location.href);
  here.searchParams.set("lang", new URLSearchParams(language.getAttribute("href").slice(1)).get("lang"));
  language.href = here.pathname + here.search;

  // --- the filter of the list
  const query = document.getElementById("q");
  const filter = () => {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of document.querySelectorAll("tr[data-words]")) {
      row.hidden = !words.every((word) => row.dataset.words.includes(word));
      shown += !row.hidden;
    }
    const nothing = document.getElementById("nothing");
    if (nothing) nothing.hidden = shown > 0;
  };
  if (query) { query.addEventListener("input", filter); filter(); }

  // --- what is new
  const FOCUS = "a, button, input, summary, [tabindex]";
  const parts = (page) => [page.querySelector("main > header"), ...page.querySelectorAll("#body > [id]")];
  const key = (part) => part.id || part.tagName;
  const known = new Map(parts(document).map((part) => [key(part), part.outerHTML]));

  function put(old, fresh) {
    const open = [...old.querySelectorAll("details")].map((each) => each.open);
    const chosen = new Set([...old.querySelectorAll("input:checked")].map((each) => each.value));
    const focus = [...old.querySelectorAll(FOCUS)].indexOf(document.activeElement);
    const scrolled = [...old.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    old.replaceWith(fresh);
    fresh.querySelectorAll("details").forEach((each, number) => { if (number < open.length) each.open = open[number]; });
    fresh.querySelectorAll("input[type=checkbox]").forEach((each) => { each.checked = chosen.has(each.value); });
    fresh.querySelectorAll(".scroll").forEach((each, number) => { each.scrollLeft = scrolled[number] || 0; });
    if (focus >= 0) fresh.querySelectorAll(FOCUS)[focus]?.focus({ preventScroll: true });
  }

  function update(page) {
    const host = document.getElementById("charts");
    if (!host !== !page.getElementById("charts")) { location.reload(); return; }
    const before = document.querySelector("header .pill")?.textContent;
    let last = null;
    const fresh = parts(page), wanted = new Set(fresh.map(key));
    for (const part of parts(document)) if (!wanted.has(key(part))) { known.delete(key(part)); part.remove(); }
    for (const part of fresh) {
      const name = key(part), old = part.id ? document.getElementById(part.id) : document.querySelector("main > header");
      const html = part.outerHTML;
      let now = old;
      if (!old) { now = document.adoptNode(part); last.id ? last.after(now) : document.getElementById("body").prepend(now); }
      else if (name !== "curves" && known.get(name) !== html) { now = document.adoptNode(part); put(old, now); }
      known.set(name, html);
      last = now;
    }
    if (host) host.dispatchEvent(new CustomEvent("charts", { detail: JSON.parse(page.getElementById("run-data").textContent).charts }));
    if (query) filter();
    main.dataset.poll = page.getElementById("content").dataset.poll;
    const after = document.querySelector("header .pill")?.textContent;
    return before !== after ? after : "";
  }

  let mark = "";
  async function look() {
    const begun = performance.now();
    try {
      const answer = await fetch(location.href, { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
      if (answer.ok) {
        mark = answer.headers.get("ETag") || "";
        said.textContent = update(new DOMParser().parseFromString(await answer.text(), "text/html")) || "";
      } else if (answer.status === 304) said.textContent = "";
      else throw new Error(answer.status);
    } catch { said.textContent = main.dataset.lost; }
    later(performance.now() - begun);
  }
  // A page that takes long to make is asked for more seldom.
  const later = (took) => {
    const seconds = Number(main.dataset.poll);
    if (seconds) setTimeout(() => (document.hidden ? later(took) : look()), Math.max(1000 * seconds, 10 * took));
  };
  later(0);

  // --- a recipe's plan, as one types
  const form = document.getElementById("plan-form"), plan = document.getElementById("plan");
  if (form) {
    let waiting = 0, asked = null;
    const ask = async () => {
      asked?.abort();
      const mine = (asked = new AbortController());
      plan.setAttribute("aria-busy", "true");
      try {
        const answer = await fetch(`${form.action}?${new URLSearchParams(new FormData(form))}&part=1`, { signal: mine.signal });
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        plan.replaceChildren(...page.querySelectorAll("#body > *"));
      } catch (error) {
        if (error.name === "AbortError") return;
        plan.textContent = main.dataset.lost;
      }
      plan.setAttribute("aria-busy", "false");
    };
    form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(ask, 350); });
    form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    ask();
  }

  const post = async (address, body) => {
    const answer = await fetch(address, { method: "POST", body, headers: { "X-CSRF": csrf } });
    const type = answer.headers.get("Content-Type") || "";
    return type.startsWith("application/json") ? answer.json() : { problem: `${answer.status} ${answer.statusText}` };
  };
  const fork = document.getElementById("fork-form");
  fork?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = new URLSearchParams(new FormData(form));
    body.set("name", new FormData(fork).get("name"));
    const done = await post(fork.action, body);
    document.getElementById("forked").textContent = done.path || done.problem;
  });

  const chat = document.getElementById("chat-form"), talk = document.getElementById("talk");
  if (chat) {
    let messages = [];
    const add = (role, text) => {
      const line = document.createElement("p");
      line.className = role;
      line.textContent = text;
      talk.append(line);
    };
    chat.addEventListener("submit", async (event) => {
      event.preventDefault();
      const box = document.getElementById("message"), button = chat.querySelector("button");
      const next = [...messages, { role: "user", content: box.value }];
      button.disabled = true;
      add("user", box.value);
      const done = await post(chat.action, JSON.stringify({ messages: next }));
      button.disabled = false;
      add("assistant", done.text ?? done.problem);
      if (done.text === undefined) return;
      messages = [...next, { role: "assistant", content: done.text }];
      box.value = "";
      box.focus();
    });
    document.getElementById("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) chat.requestSubmit();
    });
  }
})();
