// Keeps every file after the first visit, so that the page works offline; lets WebAssembly use several threads.
const CACHE = "lightformers-VERSION";
const SHELL = ["./", "index.html", "style.css", "app.js", "worker.js", "page.json"];
const HEADERS = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(SHELL)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = caches.keys().then((names) => Promise.all(
    names.filter((name) => name.startsWith("lightformers-") && name !== CACHE).map((name) => caches.delete(name)),
  ));
  event.waitUntil(old.then(() => self.clients.claim()));
});

async function answer(request) {
  const cache = await caches.open(CACHE);
  let response = await cache.match(request.url, { ignoreSearch: true });
  if (!response) {
    // transformers.js asks for the first byte to learn a file's size: get all of it once.
    response = await fetch(request.headers.has("range") ? request.url : request);
    if (response.status === 200) await cache.put(request.url, response.clone());
  }
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && new URL(request.url).origin === location.origin) event.respondWith(answer(request));
});
