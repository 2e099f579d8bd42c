"""The style of a version's page: light and dark by the reader's choice, colours that the colour-blind tell apart.

A constant. Blue and vermilion of Okabe and Ito's palette, lighter ones on a dark ground; every mark differs in shape or
in words as well. No fixed widths: a phone shows one column, and what is too wide scrolls within its own box.
"""

CSS = """
:root{color-scheme:light dark;--ground:#fff;--card:#f6f7f9;--text:#1b1f24;--soft:#555d66;--rule:#d5dae0;--a:#0063a0;
--b:#b34700;--good:#00603f;--bad:#a83200}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--card:#1d2125;--text:#e8eaed;--soft:#a9b1ba;--rule:#3a4148;
--a:#6bbdf0;--b:#f0a132;--good:#4fd0a4;--bad:#ff9a6b}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--text);font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:1160px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 8px}
h2{font-size:1.2rem;margin:36px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
p{margin:6px 0;max-width:75ch}
.lead{font-size:1.1rem}
.soft,caption,figcaption{color:var(--soft)}
ul.verdicts{list-style:none;margin:14px 0;padding:0;display:grid;gap:8px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr))}
ul.verdicts li{background:var(--card);border-left:5px solid var(--soft);border-radius:4px;padding:10px 14px}
ul.verdicts li.better{border-color:var(--good)}
ul.verdicts li.worse{border-color:var(--bad)}
.pass,.better b{color:var(--good)}
.fail,.worse b{color:var(--bad)}
.warn{color:var(--b)}
.pass,.fail,.warn{font-weight:600;white-space:nowrap}
.plots{display:grid;align-items:start;gap:20px 28px;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
figure{margin:0;background:var(--card);border-radius:6px;padding:12px}
figure h3{font-size:1rem;margin:0 0 6px}
figcaption{font-size:.875rem;margin-top:4px}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--rule);fill:none}
.axis{stroke:var(--soft);fill:none}
.line-a,.line-b{fill:none;stroke:var(--a);stroke-width:2;stroke-linejoin:round}
.line-b{stroke:var(--b);stroke-dasharray:6 3}
.limit{fill:none;stroke:var(--b);stroke-width:1.5;stroke-dasharray:2 3}
.fill-a{fill:var(--a)}
.fill-b,.fill-c{fill:var(--b)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9375rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:4px 0 6px;font-size:.875rem}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--rule)}
th{font-weight:600}
tbody th{min-width:6.5rem}
tbody th.figure{min-width:0}
.part{display:inline-block;margin-right:1.2em}
thead th{color:var(--soft)}
.facts th{width:11rem}
thead th,.figure{white-space:nowrap}
.bar{width:45%;min-width:80px}
.bar span{display:block;height:12px;margin-top:6px;min-width:1px;background:var(--a);border-radius:0 2px 2px 0}
details{margin:8px 0}
summary{cursor:pointer;padding:6px 0;color:var(--a)}
:focus-visible{outline:2px solid var(--a);outline-offset:2px}
@media(max-width:600px){.facts th,.facts td{display:block;width:auto;padding-right:0}
.facts th{border:0;padding-bottom:0}
th,td{padding-right:8px}.bar{width:30%}svg text{font-size:14.5px}}
"""
