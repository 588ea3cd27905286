// What the theme adds while a page is shown, named for screen readers and reached by keyboards.
let count = 0
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(nav => nav.setAttribute("aria-label", `Code ${++count}`))
  document.querySelectorAll("pre > code:not([tabindex]), .md-typeset__scrollwrap:not([tabindex])").forEach(part => (part.tabIndex = 0))
}).observe(document, { childList: true, subtree: true })
