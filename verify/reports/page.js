
(() => {
  "use strict";
  const form = document.getElementById("filter");
  if (!form) return;
  const rows = [...document.querySelectorAll("article.finding")];
  const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const apply = () => {
    const wanted = form.text.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const { code, severity } = row.dataset;
      row.hidden = (form.code.value && form.code.value !== code) || (form.severity.value && form.severity.value !== severity) || !words.get(row).includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} shown`;
  };

  // A link to a finding that the filter hides takes the filter away.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    const row = target && target.closest("article.finding");
    if (!row) return;
    if (row.hidden) {
      form.reset();
      apply();
    }
    target.closest("details").open = true;
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  };

  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", reveal);
  apply();
  reveal();
})();
