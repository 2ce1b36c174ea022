// The page: one Web Worker for each model, so that typing stays smooth while a model computes.
const byId = (id) => document.getElementById(id);
const show = (text) => { byId("message").textContent = text; };

async function start() {
  if (location.protocol === "file:") throw new Error("open this page from a web server: python -m http.server");
  if ("serviceWorker" in navigator) {
    await navigator.serviceWorker.register("sw.js");
    await navigator.serviceWorker.ready;
    if (!navigator.serviceWorker.controller) {
      await new Promise((done) => navigator.serviceWorker.addEventListener("controllerchange", done, { once: true }));
    }
  }
  const page = await (await fetch("page.json")).json();
  document.title = byId("title").textContent = page.title;
  byId("source").value = page.example;
  const loaded = page.models.map(() => 0);
  show("Loading the model…");
  const models = await Promise.all(page.models.map((model, index) => open(model, page, (share) => {
    loaded[index] = share;
    byId("progress").value = Math.min(...loaded);
  })));
  byId("progress").hidden = true;
  byId("translate").disabled = false;
  show("");
  const translate = async () => {
    byId("translate").disabled = true;
    show("Translating…");
    try {
      for (const run of models) await run(byId("source").value); // in turn: each measures its speed alone
      show("");
    } catch (error) {
      show(error.message);
    }
    byId("translate").disabled = false;
  };
  byId("translate").addEventListener("click", translate);
  byId("source").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) translate();
  });
  document.documentElement.dataset.ready = "true";
}

function open(model, page, progress) {
  const card = document.createElement("article");
  const [name, text, facts] = ["h2", "p", "p"].map((tag) => card.appendChild(document.createElement(tag)));
  name.textContent = model.name;
  text.className = "translation";
  facts.className = "facts";
  const size = `${(model.bytes / 1e6).toFixed(1)} MB`;
  facts.textContent = size;
  byId("models").append(card);
  const worker = new Worker(`worker.js${location.search}`, { type: "module" });
  return new Promise((ready, failed) => {
    let finish = {};
    worker.onerror = (event) => failed(new Error(`The model could not be loaded: ${event.message}`));
    worker.onmessage = ({ data }) => {
      if (data.progress !== undefined) progress(data.progress);
      if (data.ready) {
        ready((source) => new Promise((done, stop) => {
          finish = { done, stop };
          worker.postMessage({ text: source });
        }));
      }
      if (data.translation !== undefined) text.textContent = data.translation;
      if (data.error) (finish.stop ?? failed)(new Error(data.error));
      if (data.done) {
        const speed = data.seconds > 0 ? Math.round(data.tokens / data.seconds) : 0;
        card.dataset.speed = speed;
        const cut = data.cut ? ` · ${data.cut} sentences were too long and were cut at punctuation` : "";
        facts.textContent = `${size} · ${data.tokens} tokens · ${speed} tokens/s · ${data.threads} thread${data.threads > 1 ? "s" : ""}${cut}`;
        finish.done();
      }
    };
    worker.postMessage({ folder: model.folder, language: page.language });
  });
}

start().catch((error) => show(error.message));
