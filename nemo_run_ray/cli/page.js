"use strict";
// Only adds to the page: the bars, the panel and, for few jobs, the links are there without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const find = (selector) => document.querySelector(selector);
  const rows = [...document.querySelectorAll(".row")];
  const anchors = rows.map((row) => row.firstElementChild);
  const cards = rows.map((_, number) => document.getElementById(`job-${number}`));
  const after = rows.map((row) => row.dataset.after.split(" ").filter(Boolean).map(Number));
  const before = rows.map(() => []);
  after.forEach((numbers, row) => numbers.forEach((number) => before[number].push(row)));
  const texts = rows.map((row, number) =>
    `${anchors[number].textContent} ${cards[number].textContent}`.toLowerCase());
  const drawsAll = document.documentElement.dataset.links === "all";
  let picked = null; // whose panel is open
  let pointed = null; // under the pointer or with the focus

  const element = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };

  // The links, as the template draws them, but between the rows that are shown.
  const link = (source, target, places) => {
    const down = target > source;
    const [end, to] = [rows[source].dataset.to, rows[target].dataset.from];
    const y = `${((places[source] + 0.5) / places.count) * 100}%`;
    const tip = `${((places[target] + (down ? 0.2 : 0.8)) / places.count) * 100}%`;
    return [
      element("line", { x1: end, y1: y, x2: to, y2: y }),
      element("line", { x1: to, y1: y, x2: to, y2: tip }),
      element("use", { href: down ? "#head-down" : "#head-up", x: to, y: tip }),
    ];
  };
  const draw = (group, pairs) => {
    const places = { count: 0 };
    rows.forEach((row, number) => { if (!row.hidden) places[number] = places.count++; });
    const seen = pairs.filter(([one, other]) => one in places && other in places);
    find(group).replaceChildren(...seen.flatMap(([one, other]) => link(one, other, places)));
  };
  const reach = (start, next) => {
    const found = new Set();
    const left = [start];
    while (left.length) {
      for (const one of next[left.pop()]) {
        if (!found.has(one)) { found.add(one); left.push(one); }
      }
    }
    return found;
  };

  const show = () => {
    const chosen = pointed ?? picked;
    const kin = chosen === null ? new Set()
      : new Set([...reach(chosen, after), ...reach(chosen, before)]);
    rows.forEach((row, number) => {
      row.classList.toggle("kin", kin.has(number) && number !== chosen);
      row.classList.toggle("picked", number === picked);
      anchors[number].toggleAttribute("aria-current", number === picked);
    });
    document.documentElement.classList.toggle("has-chosen", kin.size > 0);
    draw(".chosen", chosen === null ? [] : [
      ...after[chosen].map((one) => [one, chosen]),
      ...before[chosen].map((one) => [chosen, one]),
    ]);
  };
  const point = (event) => {
    const row = event?.target.closest?.(".row");
    const number = row ? rows.indexOf(row) : null;
    if (number !== pointed) { pointed = number; show(); }
  };

  const move = (number) => {
    anchors[number].focus({ preventScroll: true });
    reveal(number);
  };
  const reveal = (number, margin = 0) => {
    const head = getComputedStyle(find("header")).position === "sticky"
      ? find("header").getBoundingClientRect().height : 0;
    const { top, bottom } = rows[number].getBoundingClientRect();
    if (top < head) scrollBy(0, top - head - margin);
    else if (bottom > innerHeight) scrollBy(0, bottom - innerHeight + margin);
  };
  const named = () => {
    const number = cards.findIndex((card) => `#${card.id}` === location.hash);
    return number < 0 ? null : number;
  };
  const pick = () => {
    picked = named();
    if (picked !== null) {
      if (rows[picked].hidden) { search.value = ""; only.checked = false; filter(); }
      reveal(picked, innerHeight / 3);
    }
    show();
  };
  const close = () => {
    const last = named(); // "hashchange" may still be on its way
    location.hash = "#closed"; // names nothing, so the page does not scroll
    if (last !== null) move(last);
  };

  const search = find("#filter");
  const only = find("#only-failed");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, number) => {
      const isBad = row.matches(".failed, .lost");
      row.hidden = (only.checked && !isBad) || !words.every((word) => texts[number].includes(word));
    });
    const shown = rows.filter((row) => !row.hidden).length;
    find(".shown").textContent = shown < rows.length ? `${shown} of ${rows.length} shown` : "";
    find(".nothing").hidden = shown > 0;
    if (drawsAll) draw(".all", after.flatMap((numbers, row) => numbers.map((one) => [one, row])));
    show();
  };

  const keys = (event) => {
    if (event.key !== "Escape") return;
    if (event.target === search && search.value) { search.value = ""; filter(); } else close();
  };

  find(".tools").hidden = false;
  search.addEventListener("input", filter);
  only.addEventListener("change", filter);
  find("main").addEventListener("pointerover", point);
  find("main").addEventListener("pointerleave", () => point());
  find("main").addEventListener("focusin", point);
  find("main").addEventListener("focusout", () => point());
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", pick);
  addEventListener("load", pick); // an open panel changes the head's height
  filter();
  pick();
  document.documentElement.dataset.ready = "true";
})();
