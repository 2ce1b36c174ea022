// The page: one Web Worker for each model, so that typing stays smooth while a model computes.
const byId = (id) => document.getElementById(id);
const show = (text) => { byId("message").textContent = text; };

const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

// Start the service worker, or the newest one where the server has another. The page works without: in a private
// window, a frame, with blocked cookies or little storage, and after a hard reload.
async function startServiceWorker() {
  try {
    const workers = navigator.serviceWorker;
    const registration = await workers.register("sw.js", { updateViaCache: "none" });
    const isFirst = !registration.active;
    await registration.update().catch(() => {}); // without network
    const next = registration.installing ?? registration.waiting;
    if (next && next.state !== "activated") {
      await new Promise((done) => {
        next.addEventListener("statechange", () => ["activated", "redundant"].includes(next.state) && done());
      });
    }
    if ((isFirst || next) && !workers.controller) {
      await new Promise((done) => workers.addEventListener("controllerchange", done, { once: true }));
    }
  } catch {
    // The browser does not allow one.
  }
}

function nameLanguages({ language, target, title }) {
  try {
    const names = new Intl.DisplayNames("en", { type: "language" });
    if (language && target) return `${names.of(language)} to ${names.of(target)}, on this device`;
  } catch {
    // A code that is no language.
  }
  return title;
}

// The samples of a file or a recording, 16,000 a second, all channels as one.
async function decode(file) {
  if (!file) throw new Error("Choose a file, or record.");
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, 16000).decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error(`The browser can't decode ${file.name ?? "the recording"} as sound: convert it to WAV or MP3`);
  }
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    sound.getChannelData(channel).forEach((value, place) => { samples[place] += value / sound.numberOfChannels; });
  }
  return samples;
}

// Makes the button start and end recordings, which go to a function.
function prepareRecording(button, finish) {
  let recorder;
  button.addEventListener("click", async () => {
    if (recorder?.state === "recording") return recorder.stop();
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const parts = [];
      recorder = new MediaRecorder(stream);
      recorder.ondataavailable = ({ data }) => parts.push(data);
      recorder.onstop = () => {
        stream.getTracks().forEach((track) => track.stop());
        button.textContent = "Record";
        finish(new Blob(parts));
      };
      recorder.start();
      button.textContent = "Stop";
    } catch (error) {
      show(`The microphone can't be used: ${error.message}`);
    }
  });
}

function prepareSound({ language, languages }) {
  byId("text").hidden = true;
  byId("sound").hidden = false;
  byId("translate").textContent = "Transcribe";
  const names = new Intl.DisplayNames("en", { type: "language", fallback: "code" });
  for (const code of languages) byId("language").add(new Option(names.of(code), code));
  byId("language").value = [language, navigator.language.slice(0, 2), "en"].find((code) => languages.includes(code)) ?? "";
  byId("language").closest("p").hidden = !languages.length;
}

async function start() {
  if (location.protocol === "file:") throw new Error("open this page from a web server: python -m http.server");
  if (self.origin === "null") {
    throw new Error("This frame is in a sandbox, where a page may not load its model: open the page in its own window, or add allow-same-origin to the sandbox");
  }
  await Promise.race([startServiceWorker(), wait(10)]);
  const page = await (await fetch("page.json", { cache: "no-cache" })).json();
  document.title = byId("title").textContent = nameLanguages(page);
  byId("source").value = page.example;
  const isSpeech = Boolean(page.languages); // none of an English model
  if (isSpeech) prepareSound(page);
  const loaded = page.models.map(() => 0);
  show("Loading the model…");
  const models = await Promise.all(page.models.map((model, index) => open(model, page, (share) => {
    loaded[index] = share;
    byId("progress").value = Math.min(...loaded);
  })));
  byId("progress").hidden = true;
  byId("translate").disabled = false;
  show("");
  const read = async (file) => (
    isSpeech ? { samples: await decode(file), language: byId("language").value } : { text: byId("source").value });
  const translate = async (file) => {
    byId("translate").disabled = byId("record").disabled = true;
    show(isSpeech ? "Transcribing…" : "Translating…");
    try {
      const input = await read(file);
      for (const run of models) await run(input); // in turn: each measures its speed alone
      show("");
    } catch (error) {
      show(error.message);
    }
    byId("translate").disabled = byId("record").disabled = false;
  };
  byId("translate").addEventListener("click", () => translate(byId("file").files[0]));
  prepareRecording(byId("record"), translate);
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
  const options = new URLSearchParams([...new URLSearchParams(location.search), ["version", page.version]]);
  const worker = new Worker(`worker.js?${options}`, { type: "module" });
  return new Promise((ready, failed) => {
    let finish = {};
    worker.onerror = (event) => failed(new Error(`The model could not be loaded: ${event.message}`));
    worker.onmessage = ({ data }) => {
      if (data.progress !== undefined) progress(data.progress);
      if (data.ready) {
        ready((input) => new Promise((done, stop) => {
          finish = { done, stop };
          worker.postMessage(input);
        }));
      }
      if (data.translation !== undefined) text.textContent = data.translation;
      if (data.error) (finish.stop ?? failed)(new Error(data.error));
      if (data.done) {
        const speed = (data.seconds > 0 ? data.tokens / data.seconds : 0).toFixed(data.isSpeech ? 1 : 0);
        card.dataset.speed = speed;
        const work = data.isSpeech
          ? `${data.tokens.toFixed(1)} s of sound · ${speed} times real time`
          : `${data.tokens} tokens · ${speed} tokens/s`;
        const cut = data.cut ? ` · ${data.cut} sentences were too long and were cut at punctuation` : "";
        facts.textContent = `${size} · ${work} · ${data.threads} thread${data.threads > 1 ? "s" : ""}${cut}`;
        finish.done();
      }
    };
    worker.postMessage({ folder: model.folder, dtype: model.dtype, language: page.language, isSpeech: Boolean(page.languages) });
  });
}

start().catch((error) => show(error.message));
