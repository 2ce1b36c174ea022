// Keeps every file after the first visit, so that the page works offline; lets WebAssembly use several threads.
// The page works without it, too.
const CACHE = "lightformers-VERSION";
const SHELL = ["./", "index.html", "style.css", "app.js", "worker.js", "page.json"];
const HEADERS = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };

// Fetches from the server, whatever the browser's own cache has of an earlier version, and keeps the answer if it can.
async function renew(url) {
  const response = await fetch(url, { cache: "no-cache" });
  if (response.status === 200) {
    try {
      await (await caches.open(CACHE)).put(url, response.clone());
    } catch {
      // There is too little storage: the page works, but not without network.
    }
  }
  return response;
}

async function recall(url) {
  try {
    return await (await caches.open(CACHE)).match(url, { ignoreSearch: true });
  } catch {
    return undefined;
  }
}

self.addEventListener("install", (event) => {
  event.waitUntil(Promise.allSettled(SHELL.map((name) => renew(new URL(name, location).href))).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = caches.keys().then((names) => Promise.all(
    names.filter((name) => name.startsWith("lightformers-") && name !== CACHE).map((name) => caches.delete(name)),
  ));
  event.waitUntil(old.then(() => self.clients.claim()));
});

// The page itself comes from the server, if it answers, and names the version. Files of the model are kept for a version.
async function answer(request) {
  const { url } = request;
  const inShell = request.mode === "navigate" || SHELL.some((name) => new URL(name, location).pathname === new URL(url).pathname);
  let response = inShell ? undefined : await recall(url);
  if (!response) {
    try {
      response = await renew(url); // all of it, also where transformers.js asks for the first byte to learn the size
    } catch (error) {
      response = await recall(url);
      if (!response) throw error;
    }
  }
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && new URL(request.url).origin === location.origin) event.respondWith(answer(request));
});
