// Bundle each panel into one JavaScript module and one CSS file: `npm run build [-- target directory] [-- names of panels]`.
import { build } from "esbuild";
import { existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { lean } from "./lean.mjs";

const directory = dirname(fileURLToPath(import.meta.url));
const panels = readdirSync(directory)
  .filter((file) => /^(viewer|live|judging|failures|comparison|playground|curation)\.js$/.test(file))
  .map((file) => file.slice(0, -3))
  .sort();
const selected = process.argv.slice(2).filter((word) => panels.includes(word));
const target = resolve(
  process.argv.slice(2).find((word) => !panels.includes(word)) ?? join(directory, "../art_nb/static"),
);
const LIMIT = 60 * 1024; // bytes of script and style sheet together, which are sent once for every displayed panel
const options = {
  bundle: true,
  minify: true,
  write: false,
  metafile: true,
  absWorkingDir: directory,
  format: "esm",
  target: "es2020",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
  plugins: [lean],
};

/** Return the package of a bundled file. @param {string} path */
const packageOf = (path) => /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1];

// Our custom properties (--art-*) in all style sheets. The sheets of all panels are in one page, so the names are common.
const propertyNames = [".", "judging", "live", "viewer"]
  .flatMap((folder) => readdirSync(join(directory, folder)).map((file) => join(directory, folder, file)))
  .filter((path) => path.endsWith(".css"))
  .flatMap((path) => readFileSync(path, "utf8").match(/--art-[\w-]+/g) ?? []);
const properties = [...new Set(propertyNames)].sort();

/** Return the short name of one of our custom properties. @param {string} name */
function shortName(name) {
  if (!properties.includes(name)) throw new Error(`No style sheet has a property ${name}. Write its full name.`);
  return `--a-${properties.indexOf(name).toString(36)}`;
}

/** Shorten the names and values of custom properties, which esbuild does not minify. @param {string} text */
const shortenProperties = (text) =>
  text
    .replace(/--art-[\w-]*/g, shortName)
    .replace(/(--[\w-]+): ([^;}]*)/g, (_, name, value) => `${name}:${value.replaceAll(", ", ",")}`);

/** Bundle one panel. Return the packages that it contains. @param {string} name */
async function bundle(name) {
  const packages = new Set();
  let bytes = 0;
  for (const kind of ["js", "css"]) {
    const entry = `${name}.${kind}`;
    if (!existsSync(join(directory, entry))) continue;
    const result = await build({ ...options, entryPoints: [entry], outfile: entry });
    const text = shortenProperties(result.outputFiles[0].text);
    writeFileSync(join(target, entry), text);
    bytes += Buffer.byteLength(text);
    Object.values(result.metafile.outputs).forEach((output) =>
      Object.entries(output.inputs).forEach(([path, part]) => part.bytesInOutput && packages.add(packageOf(path))),
    );
  }
  console.log(`${name}: ${(bytes / 1024).toFixed(1)} kB`);
  if (bytes > LIMIT)
    throw new Error(`The panel ${name} has ${bytes} bytes; the limit is ${LIMIT}. Remove code or shorten texts.`);
  return packages;
}

/** Return the name, version and license of a package. @param {string} name */
function licenseText(name) {
  const folder = join(directory, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  return `${name} ${version}\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
}

mkdirSync(target, { recursive: true });
const packages = new Set();
for (const name of selected.length ? selected : panels)
  (await bundle(name)).forEach((package_) => package_ && packages.add(package_));
if (selected.length) process.exit(); // LICENSES.txt is written for all panels together
const texts = [...packages].sort().map(licenseText);
writeFileSync(
  join(target, "LICENSES.txt"),
  ["The panels contain these packages.\n", ...texts].join("\n" + "-".repeat(80) + "\n\n"),
);
