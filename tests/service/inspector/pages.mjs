// Opens the Inspector in Chromium and prints what happened as JSON, for test_pages.py.
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const { url, key, tenant, memory, query, folder } = JSON.parse(readFileSync(0, "utf8"));
mkdirSync(folder, { recursive: true });
process.env.TMPDIR = folder; // where the package unpacks; kept for the next run
const { resolve } = createRequire(import.meta.url);

async function launched() {
  const { chromium: driver } = await import("playwright-core");
  const executablePath = await (await import("@sparticuz/chromium")).default.executablePath();
  const args = ["--no-sandbox", "--headless=shell", "--disable-gpu"];
  try {
    return await driver.launch({ executablePath, args });
  } catch {
    // A bare machine lacks its libraries (libnss3). The package has them, for Amazon's Linux.
    const build = join(resolve("@sparticuz/chromium"), "../..");
    const { inflate } = await import(join(build, "esm/lambdafs.js"));
    await inflate(join(build, "../bin/al2023.tar.br"));
    const env = { FONTCONFIG_PATH: join(folder, "fonts"), ...process.env, LD_LIBRARY_PATH: join(folder, "al2023/lib") };
    return driver.launch({ executablePath, args, env });
  }
}

const axe = readFileSync(resolve("axe-core"), "utf8");
const seen = { dialogs: [], foreign: [], console: [], wide: [], violations: [], made: [], keyboard: {} };
const at = `${url}/inspect/tenants/${encodeURIComponent(tenant)}`;
const search = `${at}/search?q=${encodeURIComponent(query)}`;
const one = `${at}/memories/${memory}`;
const paths = [`${url}/inspect`, at, one, search, `${url}/inspect/health?spend=true`, `${at}/memories/none`];
// what no template makes
const foreign = "script, img, iframe, object, embed, style, [style], [onerror], [onload], [onfocus]";
const browser = await launched();

async function opened(width, colorScheme) {
  const context = await browser.newContext({ viewport: { width, height: 800 }, colorScheme });
  const page = await context.newPage();
  page.on("dialog", (dialog) => (seen.dialogs.push(dialog.message()), dialog.dismiss()));
  page.on("request", (request) => new URL(request.url()).origin === url || seen.foreign.push(request.url()));
  page.on("console", (said) => said.text().startsWith("Failed to load") || seen.console.push(said.text()));
  page.on("pageerror", (error) => seen.console.push(String(error)));
  await page.goto(`${url}/inspect`);
  return page;
}

async function examine(page, width) {
  for (const summary of await page.$$("summary")) await summary.press("Enter");
  const [wide, made] = await page.evaluate((foreign) => {
    const leading = [...document.links].filter((link) => !link.href.startsWith(`${location.origin}/inspect`));
    const made = [...document.querySelectorAll(foreign), ...leading].map((element) => element.outerHTML);
    return [document.documentElement.scrollWidth, made];
  }, foreign);
  if (wide > width) seen.wide.push(`${page.url()} at ${width}: ${wide}`);
  seen.made.push(...made);
  const driver = await page.context().newCDPSession(page); // the policy lets no script of a page run
  await driver.send("Runtime.evaluate", { expression: axe });
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const { id, impact, nodes } of violations)
    if (["serious", "critical"].includes(impact)) seen.violations.push([page.url(), width, id, nodes[0].html]);
}

/** Tab until the focused element has this id, or a text that begins so; then press Enter or type. */
async function tabTo(page, wanted, typed = "") {
  const focused = () => [document.activeElement.id, document.activeElement.textContent.trim()];
  for (let n = 0, id = "", text = ""; id !== wanted && !text.startsWith(wanted); n++) {
    if (n > 60) throw new Error(`the keyboard does not reach ${wanted} on ${page.url()}`);
    await page.keyboard.press("Tab");
    [id, text] = await page.evaluate(focused);
  }
  await page.keyboard.type(typed);
  await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]);
}

async function byKeyboard() {
  const page = await opened(1280, "light");
  await page.waitForSelector("#key:focus"); // nobody has to look for the field
  await page.keyboard.type(key);
  await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]);
  await tabTo(page, tenant);
  await tabTo(page, "Search");
  await tabTo(page, "q", query);
  await tabTo(page, "turn ");
  seen.keyboard = { path: new URL(page.url()).pathname, title: await page.title() };
  await tabTo(page, "Sign out");
  seen.keyboard.after = await page.textContent("h1");
}

async function lookAround(width, colorScheme) {
  const page = await opened(width, colorScheme);
  await examine(page, width);
  await page.fill("#key", key);
  await Promise.all([page.waitForNavigation(), page.click("main button")]);
  for (const path of paths) await page.goto(path).then(() => examine(page, width));
}

await Promise.all([byKeyboard(), lookAround(1280, "light"), lookAround(390, "dark")]);
await browser.close();
console.log(JSON.stringify(seen));
