// One model: load it, split the text into sentences, translate them, put them together with all spaces and line breaks;
// or transcribe sound.
import { AutoModelForSeq2SeqLM, AutoTokenizer, env, pipeline } from "./vendor/transformers.min.js";

const here = new URL(".", import.meta.url);
env.allowLocalModels = true;
env.allowRemoteModels = env.useBrowserCache = env.useWasmCache = false; // the service worker keeps all files
env.localModelPath = here.pathname;
env.fetch = (url, options) => fetch(url, { ...options, cache: "no-cache" }); // not those of an earlier version
env.backends.onnx.wasm.wasmPaths = {
  mjs: new URL("vendor/ort-wasm-simd-threaded.mjs", here).href,
  wasm: new URL("vendor/ort-wasm-simd-threaded.wasm", here).href,
};
// Several threads, ?threads=2, slow a small model down where other programs use the processor.
const threads = self.crossOriginIsolated ? Number(new URL(import.meta.url).searchParams.get("threads")) || 1 : 1;
env.backends.onnx.wasm.numThreads = threads;

let tokenizer, model, language, longest, prefix, codes, transcriber;

const ENDINGS = { q8: "quantized", q4: "q4" }; // of the names of files

async function load(folder, dtype, isSpeech) {
  const progress_callback = (event) => {
    if (event.status === "progress_total") postMessage({ progress: event.progress / 100 });
  };
  if (isSpeech) {
    transcriber = await pipeline("automatic-speech-recognition", folder, { dtype, device: "wasm", progress_callback });
    return;
  }
  tokenizer = await openTokenizer(folder);
  const encoder = `encoder_model_${ENDINGS[dtype]}.onnx`; // holds tensors of the decoder, too
  const session_options = { externalData: [{ path: encoder, data: `onnx/${encoder}` }] };
  const options = { dtype, device: "wasm", progress_callback, session_options };
  model = await AutoModelForSeq2SeqLM.from_pretrained(folder, options);
  const positions = model.config.max_position_embeddings ?? Infinity;
  longest = Math.min(positions, 512);
  prefix = model.config.prefix ?? "";
  codes = new Set(model.config.target_codes ?? []);
}

// SentencePiece writes characters that are no piece as bytes. transformers.js does so for BPE, not for Unigram.
function fallBackToBytes(unigram) {
  const { tokens_to_ids: ids, unk_token } = unigram;
  if (unigram.config?.type !== "Unigram" || !unigram.config.byte_fallback) return;
  const name = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;
  const spell = (text) => Array.from(new TextEncoder().encode(text), name);
  const encode = unigram.encode.bind(unigram);
  unigram.encode = (words) => encode(words).flatMap((token) => {
    if (ids.has(token) && token !== unk_token) return [token];
    const bytes = spell(token);
    return bytes.every((byte) => ids.has(byte)) ? bytes : [token];
  });
}

// SentencePiece's normalizer replaces the longest known prefix again and again. transformers.js has an approximation.
// The table is a number of bytes, a trie of so many in 32-bit units (Darts-clone), and texts that end with a zero.
function readCharsmap(base64) {
  const table = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const begin = 4 + new DataView(table.buffer).getUint32(0, true);
  const trie = new Uint32Array(table.buffer.slice(4, begin));
  const next = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
  const longest = (bytes, start) => {
    let [place, found, length] = [next(trie[0]), -1, 0];
    for (let at = start; at < bytes.length; at += 1) {
      const unit = trie[place ^ bytes[at]];
      if (unit === undefined || (unit & 0x800000ff) !== bytes[at]) break;
      place ^= bytes[at] ^ next(unit);
      if (unit & 256) [found, length] = [begin + (trie[place] & 0x7fffffff), at + 1 - start];
    }
    return [found, length];
  };
  return (text) => {
    const [bytes, output] = [new TextEncoder().encode(text), []];
    for (let start = 0; start < bytes.length;) {
      const [found, length] = longest(bytes, start);
      if (length) {
        output.push(...table.subarray(found, table.indexOf(0, found)));
        start += length;
      } else {
        do output.push(bytes[start++]); while ((bytes[start] & 0xc0) === 0x80);
      }
    }
    return new TextDecoder().decode(Uint8Array.from(output));
  };
}

export async function openTokenizer(folder) {
  const opened = await AutoTokenizer.from_pretrained(folder);
  const { model: pieces, normalizer } = opened._tokenizer;
  fallBackToBytes(pieces);
  for (const step of normalizer?.normalizers ?? [normalizer]) {
    if (step?.config?.type === "Precompiled") step.normalize = readCharsmap(step.config.precompiled_charsmap);
  }
  return opened;
}

// The sentences of every line, without the prefix that a line begins with.
export function segments(text, prefix) {
  const segmenter = Intl.Segmenter && new Intl.Segmenter(language, { granularity: "sentence" });
  return text.split(/(\n+)/).flatMap((line) => {
    const rest = line.startsWith(prefix) ? line.slice(prefix.length) : line;
    if (segmenter) return [...segmenter.segment(rest)].map(({ segment }) => segment);
    return rest.match(/[^.!?]*[.!?]*\s*/g).filter(Boolean);
  });
}

function fit(sentence, start) {
  if (tokenizer.encode(start + sentence).length <= longest) return [sentence];
  const middle = sentence.length / 2;
  const marks = [/[,;:–—)、，；：]\s*/g, /\s+/g];
  for (const mark of marks) {
    const places = [...sentence.matchAll(mark)].map((found) => found.index + found[0].length);
    const inside = places.filter((place) => place > 0 && place < sentence.length);
    if (inside.length) {
      const place = inside.reduce((best, each) => (Math.abs(each - middle) < Math.abs(best - middle) ? each : best));
      return [...fit(sentence.slice(0, place), start), ...fit(sentence.slice(place), start)];
    }
  }
  const place = Math.ceil(middle);
  return [...fit(sentence.slice(0, place), start), ...fit(sentence.slice(place), start)];
}

async function translate(text) {
  let [translation, tokens, cut, seconds] = ["", 0, 0, 0];
  let start = prefix; // or the code of the target language before the line, >>spa<<, for each of its sentences
  for (const segment of segments(text, prefix)) {
    let [, before, sentence, after] = segment.match(/^(\s*)([\s\S]*?)(\s*)$/);
    const code = sentence.match(/^(>>[^<>\s]+<<)\s*/);
    if (code && codes.has(code[1])) {
      start = `${code[1]} `;
      sentence = sentence.slice(code[0].length);
    }
    translation += before;
    if (sentence) {
      const parts = fit(sentence, start);
      cut += parts.length > 1;
      for (const part of parts) {
        const begun = performance.now();
        const output = await model.generate({ ...tokenizer(start + part), num_beams: 1 });
        seconds += (performance.now() - begun) / 1000;
        tokens += output.dims[1] - 1;
        translation += tokenizer.decode(output, { skip_special_tokens: true }).trim();
        if (part !== parts.at(-1)) translation += part.match(/\s*$/)[0];
        postMessage({ translation });
      }
    }
    translation += after;
  }
  postMessage({ translation, tokens, cut, seconds, threads, done: true });
}

async function transcribe(samples, spoken) {
  const { chunk_length, sampling_rate } = transcriber.processor.feature_extractor.config;
  const begun = performance.now();
  // Longer sound is cut into pieces that overlap.
  const isLong = samples.length > chunk_length * sampling_rate;
  const pieces = isLong ? { chunk_length_s: chunk_length, stride_length_s: chunk_length / 6 } : {};
  const { text } = await transcriber(samples, { ...pieces, ...(spoken ? { language: spoken, task: "transcribe" } : {}) });
  const seconds = (performance.now() - begun) / 1000;
  const done = { tokens: samples.length / sampling_rate, seconds, threads, isSpeech: true, done: true };
  postMessage({ translation: text.trim(), ...done });
}

self.onmessage = async ({ data }) => {
  try {
    if (data.folder) {
      language = data.language ?? undefined;
      await load(data.folder, data.dtype, data.isSpeech);
      postMessage({ ready: true });
    } else if (data.samples) {
      await transcribe(data.samples, data.language);
    } else {
      await translate(data.text);
    }
  } catch (error) {
    postMessage({ error: error.message });
  }
};
