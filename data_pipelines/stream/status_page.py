"""The ledger's page for people. It holds no data: its script asks /status with the token from the page's address."""

STATUS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Draftsmith: stream</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
 table { border-collapse: collapse; margin: .5rem 0 1.5rem } th, td { padding: .2rem 1rem .2rem 0; text-align: left }
 th { font-weight: 600; border-bottom: 1px solid #bbb } .bad { color: #b00020 } .quiet { color: #777 }
</style></head><body>
<h1>Stream</h1><p id="head" class="quiet">…</p>
<h2>Packs in the window</h2><table id="packs"></table>
<h2>Since the ledger started</h2><table id="totals"></table>
<h2>Producers</h2><table id="producers"></table>
<h2>Failed packs</h2><table id="failed"></table>
<script>
const token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
function table(id, columns, rows) {
  const node = document.getElementById(id);
  node.replaceChildren();
  for (const [cells, tag] of [[columns, "th"], ...rows.map(row => [row, "td"])]) {
    const line = node.insertRow();
    for (const cell of cells) {
      const box = document.createElement(tag);
      box.textContent = cell === null || cell === undefined ? "–" : cell;
      line.append(box);
    }
  }
}
async function refresh() {
  const head = document.getElementById("head");
  try {
    const answer = await fetch("status", {headers: {Authorization: "Bearer " + token}});
    if (answer.status === 401) throw new Error("add #token=<content of ledger.token> to this page's address");
    const s = await answer.json();
    head.className = "quiet";
    head.textContent = `up ${Math.round(s.uptime)} s · next pack ${s.next_index ?? "–"} · ` +
      `${(s.bytes_stored / 2 ** 20).toFixed(1)} MiB waiting in the store` + (s.finished ? " · finished" : "");
    table("packs", Object.keys(s.packs), [Object.values(s.packs)]);
    table("totals", Object.keys(s.totals), [Object.values(s.totals)]);
    table("producers", ["producer", "works on", "stored", "MiB", "failed", "expired", "seconds since seen"],
      s.producers.map(p =>
        [p.name, p.works_on, p.stored, (p.bytes / 2 ** 20).toFixed(1), p.failed, p.expired, p.seen.toFixed(0)]));
    table("failed", ["index", "pack", "reasons"], s.failed.map(f => [f.index, f.pack, f.reasons.join(" · ")]));
  } catch (error) {
    head.className = "bad";
    head.textContent = String(error.message || error);
  }
  setTimeout(refresh, 2000);
}
refresh();
</script></body></html>
"""
