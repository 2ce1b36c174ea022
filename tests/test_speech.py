"""Sound is read from every layout, at every rate; silence is found, and unusable sound is refused."""

import json
import re

import numpy as np
import pytest
import soundfile
from speech import RATE, sound, texts, write_speech

from lightformers_hf.data_files import is_sound
from lightformers_hf.speech import Sound, cut_pieces, find_sounds, find_speech


@pytest.fixture
def wave():
    return sound("abcdefgh")


@pytest.mark.parametrize("rate", [8000, 44100])
@pytest.mark.parametrize("channels", [1, 2])
def test_every_rate_and_channel_becomes_the_same_sound(rate, channels, tmp_path):
    low = "aab"  # below half of the lowest rate
    wave = sound(low, rate)
    soundfile.write(tmp_path / "some.wav", np.stack([wave] * channels, axis=1), rate)
    found = Sound("some.wav", tmp_path / "some.wav").read()
    expected = sound(low)
    assert found.dtype == np.float32
    assert abs(len(found) - len(expected)) <= 2
    length = min(len(found), len(expected))
    assert np.corrcoef(found[:length], expected[:length])[0, 1] > 0.99


def test_layouts_hold_the_same_sounds(tmp_path):
    from datasets import Audio, Dataset

    sentences = texts(3)
    folder = write_speech(tmp_path / "folder", sentences)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    table = tmp_path / "table"
    write_speech(table, sentences, transcribed=False)
    (table / "metadata.csv").write_text("file_name,text\n" + "".join(f"{r['file_name']},{r['text']}\n" for r in rows))
    bare = write_speech(tmp_path / "bare", sentences, transcribed=False)
    contents = [{"bytes": (folder / row["file_name"]).read_bytes(), "path": None} for row in rows]
    data = Dataset.from_dict({"audio": contents, "sentence": sentences}).cast_column("audio", Audio(decode=False))
    data.to_parquet(tmp_path / "data.parquet")
    places = [folder, folder / "metadata.jsonl", table, tmp_path / "data.parquet", bare, bare / "000.flac"]
    for place, number in zip(places, [3, 3, 3, 3, 3, 1], strict=True):
        found = find_sounds(str(place))
        assert len({one.name for one in found}) == number  # by which a recovery knows them
        assert [one.text for one in found] == ([None] * number if "bare" in str(place) else sentences)
        for one, text in zip(found, sentences, strict=False):
            np.testing.assert_allclose(one.read(), sound(text), atol=1e-4)


def test_folders_of_folders_and_several_names_hold_the_same_sounds(tmp_path):
    sentences = texts(4)
    write_speech(tmp_path / "all" / "first", sentences[:2])
    write_speech(tmp_path / "all" / "second", sentences[2:])
    write_speech(tmp_path / "all" / "without", sentences[:1], transcribed=False)
    (tmp_path / "all" / "first" / "._000.flac").write_bytes(b"what macOS writes beside a file")
    names = [f"{part}/00{number}.flac" for part in ("first", "second") for number in range(2)] + ["without/000.flac"]
    found = find_sounds(str(tmp_path / "all"))
    assert [(sound.name, sound.text) for sound in found] == list(zip(names, [*sentences, None], strict=True))
    both = f"{tmp_path / 'all' / 'first'}, {tmp_path / 'all' / 'second'}"
    assert [sound.text for sound in find_sounds(both)] == sentences
    assert len({sound.name for sound in find_sounds(both)}) == 4
    pattern = f"{tmp_path}/all/*/*.flac"
    assert [sound.content for sound in find_sounds(pattern)] == [tmp_path / "all" / name for name in names]
    for data in (tmp_path / "all", both, pattern, tmp_path / "all" / "first" / "000.flac"):
        assert is_sound(str(data))
    (tmp_path / "empty").mkdir()
    for data in (tmp_path / "empty", "first,", "Ein Hund läuft. " * 50):
        assert not is_sound(str(data))


def test_silence_is_found_and_long_sound_cut(tmp_path, wave):
    pause = np.zeros(RATE, np.float32)
    spoken = find_speech(np.concatenate([pause, wave, pause]), RATE // 50, 200)
    times = np.flatnonzero(spoken) / 50
    assert 0.85 < times[0] < 1.0
    assert 0 <= times[-1] - 1 - len(wave) / RATE < 0.15
    soundfile.write(tmp_path / "long.flac", np.tile(np.concatenate([wave, pause]), 3), RATE)
    soundfile.write(tmp_path / "silent.flac", pause, RATE)
    long, silent = (Sound(name, tmp_path / name, "text") for name in ("long.flac", "silent.flac"))
    pieces = cut_pieces([long, silent], seconds=2, positions=100)
    assert [round(len(piece.wave) / RATE, 2) for piece in pieces] == [2, 2, 2]  # the end of the sound is silent
    assert {piece.text for piece in pieces} == {None}
    assert cut_pieces([Sound("short", long.content, "text")], seconds=30, positions=1500)[0].text == "text"


def write_bad(folder, kind):
    path = folder / "bad.wav"
    if kind == "text":
        path.write_text("no sound")
    elif kind == "empty":
        soundfile.write(path, np.zeros(0), RATE)
    else:
        soundfile.write(path, np.array([np.nan, 0.1]), RATE, subtype="FLOAT")
    return Sound(path.name, path)


@pytest.mark.parametrize(
    ("kind", "message"), [("text", "can't be read as sound"), ("empty", "holds no samples"), ("nan", "holds NaN")]
)
def test_unusable_files_are_named(kind, message, tmp_path):
    with pytest.raises(ValueError, match=f"bad.wav {message}"):
        write_bad(tmp_path, kind).read()


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, ValueError, "holds no sound"),
        ({"metadata.jsonl": '{"words": "a"}\n'}, ValueError, "has no column of sound: it has words"),
        ({"metadata.jsonl": '{"file_name": "gone.wav"}\n'}, FileNotFoundError, "gone.wav, which .* names"),
        ({"metadata.jsonl": '{"file_name": "a.wav", "text": 3}\n'}, ValueError, "a transcript is int"),
    ],
    ids=["empty", "no-column", "missing", "number"],
)
def test_folders_that_do_not_fit_are_named(files, error, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        find_sounds(str(tmp_path))
    with pytest.raises(ValueError, match=re.escape("no column 'words'")):
        find_sounds(str(write_speech(tmp_path / "speech", ["ab"])), column="words")
