"""The style of the page: light and dark as the reader's system is, on wide screens, phones and paper."""

__all__ = ["STYLE"]

# Every pair of a text's colour and the one behind it has a contrast of at least 4.5 (WCAG 2.2, AA); a test measures it.
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --quiet: #555; --rule: #888; --line: #ddd;
  --link: #005a9c; --warn: #d55e00; --warn-paper: #fff1e0; --mark: #0072b2; --mark-paper: #eef5fb }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181c; --quiet: #b4b8be;
  --rule: #7d838c; --line: #3a3e45; --link: #7cc0f5; --warn: #e8853a; --warn-paper: #38240f; --mark: #56b4e9;
  --mark-paper: #14283a } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
a { color: var(--link) } a:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .8rem .35rem 0 }
th { border-bottom: 2px solid var(--rule) } td { border-bottom: 1px solid var(--line); vertical-align: top }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal }
td.figure { white-space: nowrap }
.charts, .reach { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem }
.charts figure, .reach figure { margin: 0 } .chart > svg { width: 100%; height: auto }
.plots { display: none; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: .5rem 1rem }
.plot { min-width: 0 } .panel { margin: 0; font-weight: 600; font-size: .95rem }
@media screen { .live > svg { display: none } .live > .plots { display: grid } }
.warning { background: var(--warn-paper); border-left: 4px solid var(--warn); padding: .5rem 1rem }
.plain { background: var(--mark-paper); border-left: 4px solid var(--mark); padding: .5rem 1rem; font-size: 1.05rem }
.facts td:first-child { white-space: nowrap; font-weight: 600; width: 9rem }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem }
.note { color: var(--quiet); font-size: .9rem } summary { cursor: pointer; color: var(--quiet); font-size: .9rem }
summary:focus-visible, input:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px }
input[type="checkbox"] { width: 1.1rem; height: 1.1rem; vertical-align: -.15rem } label { cursor: pointer }
.data { width: auto } .data td { font-size: .9rem; font-variant-numeric: tabular-nums }
.arms td:not(:first-child), .arms th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums }
.settings td { font-size: .9rem } .paper .chart > svg { max-width: 42rem } .paper { margin: 1rem 0 }
.held { border-left: 4px solid #009e73; padding-left: .7rem } .failed { border-left: 4px solid var(--warn);
  padding-left: .7rem } .open { border-left: 4px solid var(--rule); padding-left: .7rem } ul.claims { list-style: none;
  padding: 0 } ul.claims li { margin: .4rem 0 }
@media screen and (max-width: 44rem) {
  body { margin-top: 1rem }
  .facts td, .facts tr, .facts tbody { display: block }
  .facts td { padding-right: 0 } .facts td:first-child { border: 0; width: auto; padding-bottom: 0 }
  .facts td:first-child:empty { display: none }
  .arms, .arms tbody, .arms tr, .arms td { display: block } .arms tr:first-child { display: none }
  .arms tr { border-bottom: 1px solid var(--rule); padding: .4rem 0 } .arms td { border: 0; padding: .1rem 0 }
  .arms td:first-child { font-weight: 600 } .arms td:not(:first-child) { display: flex; justify-content: space-between;
    gap: 1rem } .arms td::before { content: attr(data-head); color: var(--quiet) }
  .settings, .settings tbody, .settings tr, .settings td { display: block } .settings th { display: none }
  .settings td:first-child { font-weight: 600; border: 0 }
  .runs, .runs tbody { display: block }
  .runs tr { display: grid; grid-template-columns: 3fr 2fr 2fr 3fr; border-bottom: 1px solid var(--line) }
  .runs th, .runs td { border: 0; padding-right: .4rem; font-size: .9rem; white-space: normal }
  /* the first and the last cell have lines of their own; steps and seconds are left to the reports below */
  .runs :is(th, td):nth-child(n + 6):not(:last-child) { display: none }
  .runs :is(th, td):first-child { grid-column: 1 / -1; padding-bottom: 0; font-weight: 600 }
  .runs :is(th, td):last-child { grid-column: 1 / -1; padding-top: 0; color: var(--quiet) }
}
@media print {
  body { margin: 0; max-width: none; font-size: 11pt } nav { display: none }
  .charts, .reach { grid-template-columns: 1fr 1fr } figure, tr, .warning, .plain { break-inside: avoid }
  h2, h3 { break-after: avoid }
}
"""
