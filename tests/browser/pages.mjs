// Opens the Inspector in Chromium and prints what happened as JSON. Asked by test_inspector_browser.py.
import { existsSync, mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { tmpdir } from "node:os";

const { url, key, tenant, memory, query, chromium: folder } = JSON.parse(readFileSync(0, "utf8"));
mkdirSync(folder, { recursive: true });
process.env.TMPDIR = folder; // where the package unpacks; kept for the next run

async function launched() {
  const { chromium: driver } = await import("playwright-core");
  const chromium = (await import("@sparticuz/chromium")).default;
  const args = ["--no-sandbox", "--headless=shell", "--disable-gpu"];
  try {
    return await driver.launch({ executablePath: await chromium.executablePath(), args });
  } catch {
    // A bare machine lacks its libraries (libnss3). The package has them, for Amazon's Linux.
    const bin = join(createRequire(import.meta.url).resolve("@sparticuz/chromium"), "../../../bin");
    const { inflate } = await import(join(bin, "../build/esm/lambdafs.js"));
    await inflate(join(bin, "al2023.tar.br"));
    const env = { ...process.env, LD_LIBRARY_PATH: join(tmpdir(), "al2023/lib") };
    env.FONTCONFIG_PATH ??= join(tmpdir(), "fonts");
    return driver.launch({ executablePath: await chromium.executablePath(), args, env });
  }
}

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core"), "utf8");
const seen = { dialogs: [], foreign: [], console: [], wide: [], violations: [], made: [], keyboard: {} };
const at = `${url}/inspect/tenants/${encodeURIComponent(tenant)}`;
const paths = {
  start: `${url}/inspect`,
  timeline: at,
  memory: `${at}/memories/${memory}`,
  search: `${at}/search?q=${encodeURIComponent(query)}`,
  health: `${url}/inspect/health?spend=true`,
  problem: `${at}/memories/nothing`,
};
const browser = await launched();

async function opened(width, colorScheme) {
  const context = await browser.newContext({ viewport: { width, height: 800 }, colorScheme });
  const page = await context.newPage();
  page.on("dialog", (dialog) => (seen.dialogs.push(dialog.message()), dialog.dismiss()));
  page.on("request", (request) => new URL(request.url()).origin === url || seen.foreign.push(request.url()));
  page.on("console", (message) => message.text().includes("Failed to load") || seen.console.push(message.text()));
  page.on("pageerror", (error) => seen.console.push(String(error)));
  return page;
}

async function examine(page, name) {
  const width = page.viewportSize().width;
  const [wide, made] = await page.evaluate(() => [
    document.documentElement.scrollWidth,
    // what no template makes, and links that lead elsewhere
    [...document.querySelectorAll("script, img, iframe, object, embed, style, [style], [onerror], [onload]")]
      .concat([...document.links].filter((a) => !a.href.startsWith(`${location.origin}/inspect`)))
      .map((element) => element.outerHTML.slice(0, 120)),
  ]);
  if (wide > width) seen.wide.push(`${name} at ${width}: ${wide}`);
  seen.made.push(...made);
  // by the driver: the policy of the pages lets no script of theirs run
  const session = await page.context().newCDPSession(page);
  await session.send("Runtime.evaluate", { expression: axe });
  const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const { id, impact, nodes } of found.violations)
    if (["serious", "critical"].includes(impact))
      seen.violations.push(`${name} at ${width}: ${id} ${nodes[0].html.slice(0, 160)} ${nodes[0].failureSummary}`);
}

/** Tab until the focused element has this text, value or id. */
async function tabTo(page, wanted) {
  for (let n = 0; n < 60; n++) {
    await page.keyboard.press("Tab");
    const focused = await page.evaluate(() => {
      const { id, textContent, tagName } = document.activeElement;
      return { id, text: textContent.trim(), tagName };
    });
    if (focused.id === wanted || focused.text.startsWith(wanted)) return;
  }
  throw new Error(`the keyboard does not reach ${wanted} on ${page.url()}`);
}

async function byKeyboard() {
  const page = await opened(1280, "light");
  const loaded = (act) => Promise.all([page.waitForNavigation(), act]);
  await page.goto(paths.start);
  await page.keyboard.type(key); // the field has the focus
  await loaded(page.keyboard.press("Enter"));
  await tabTo(page, tenant);
  await loaded(page.keyboard.press("Enter"));
  await tabTo(page, "Search");
  await loaded(page.keyboard.press("Enter"));
  await tabTo(page, "q");
  await page.keyboard.type(query);
  await loaded(page.keyboard.press("Enter"));
  await tabTo(page, "turn ");
  await loaded(page.keyboard.press("Enter"));
  seen.keyboard = { path: new URL(page.url()).pathname, title: await page.title() };
  await tabTo(page, "Sign out");
  await loaded(page.keyboard.press("Enter"));
  seen.keyboard.after = await page.textContent("h1");
  return page;
}

async function lookAround(width, colorScheme) {
  const page = await opened(width, colorScheme);
  await page.goto(paths.start);
  await examine(page, "sign-in");
  await page.fill("#key", key);
  await Promise.all([page.waitForNavigation(), page.click("main button")]);
  for (const [name, path] of Object.entries(paths)) {
    await page.goto(path);
    for (const summary of await page.$$("summary")) await summary.click();
    await examine(page, name);
  }
  await page.context().close();
}

await Promise.all([byKeyboard(), lookAround(1280, "light"), lookAround(390, "dark")]);
await browser.close();
console.log(JSON.stringify(seen));
