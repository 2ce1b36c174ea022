"""`lightformers report`: what the page says against what the files say, and in a real browser."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from PIL import Image

from lightformers_hf import convert, translate
from lightformers_hf.conversion.report import MatrixReport
from lightformers_hf.evaluation import plots
from lightformers_hf.evaluation.comparison import Deployed, EngineComparison, Timing
from lightformers_hf.evaluation.page import _mark_differences, report_page
from lightformers_hf.evaluation.speed import Speed

FOREIGN = '<script>document.title = "owned"</script><img src="http://192.0.2.1/x.png">'


@pytest.fixture(scope="module")
def light(tmp_path_factory, tiny_marian):
    """The tiny teacher at rank 8, with a training log of which the values are known."""
    folder = tmp_path_factory.mktemp("page") / "light"
    convert(tiny_marian, folder, rank=8, method="paper")
    log = [{"step": step, "loss": 10 / step} for step in (10, 20, 30)]
    log += [{"step": 20, "eval_loss": 0.6, "eval_bleu": 31.0, "eval_runtime": 1.0}, {"step": 30, "train_loss": 0.5}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, parallel_sentences):
    """The ten sentences, and one of which the reference is no text for a page."""
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    pairs = [*parallel_sentences, {"de": "Der Hund schläft.", "en": FOREIGN}]
    file.write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in pairs), encoding="utf-8")
    return file


def results_file(path, name, bleu, parameters, speed, *, teacher=None, **changed):
    def measured(name, bleu, parameters, speed):
        return {
            "name": f"/somebody/secret/{name}", "scores": {"bleu": bleu, "chrf": bleu + 10},
            "parameters": parameters, "disk_bytes": 4 * parameters,
            "memory_bytes": None, "libraries_bytes": None, "tokens_per_second": speed, "tokens": None,
        }  # fmt: skip

    ratio = speed / 50 if teacher else None
    content = {
        "model": measured(name, bleu, parameters, speed),
        "teacher": measured("teacher", 40.0, 9_000_000, 50.0) if teacher else None,
        "speed_ratio": ratio, "data": "/somebody/test.jsonl", "source": "de", "target": "en", "sentences": 11,
        "generation": {"num_beams": 4}, "signatures": {"bleu": "nrefs:1"}, "differences": {},
        "labels": {"bleu": "BLEU", "chrf": "chrF"},
    }  # fmt: skip
    path.write_text(json.dumps(content | changed))
    return path


class Outline(HTMLParser):
    """Headings, cells, attributes that load something, and pictures of a page."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.cells, self.loads, self.tags = [], [], [], set()
        self.into = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.into = {"h2": self.headings, "td": self.cells, "dd": self.cells}.get(tag, self.into)
        if tag in ("h2", "td", "dd"):
            self.into.append("")
        self.loads += [value for name, value in attributes if name in ("src", "srcset", "href", "action", "data")]

    def handle_endtag(self, tag):
        if tag in ("h2", "td", "dd"):
            self.into = None

    def handle_data(self, text):
        if self.into is not None:
            self.into[-1] += text


@pytest.fixture(scope="module")
def page(light, tiny_marian, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    results = [
        results_file(folder / "a.json", "r2", 39.0, 4_500_000, 75.0, teacher=True),
        results_file(folder / "b.json", "r4", 35.5, 2_250_000, 105.0, teacher=True),
    ]
    return report_page(str(light), teacher=str(tiny_marian), data=str(data), results=results, samples=11)


def test_the_page_holds_everything_and_loads_nothing(page):
    outline = Outline(page)
    assert outline.headings == [
        "Error of every layer", "Quality against size and speed", "Training", "Sample translations", "Plan",
    ]  # fmt: skip
    assert len(outline.loads) == 12
    assert not outline.tags & {"script", "link", "iframe", "object"}
    tall = 0
    for address in outline.loads:
        picture = base64.b64decode(address.removeprefix("data:image/png;base64,"), validate=True)
        with Image.open(io.BytesIO(picture)) as image:
            assert image.width in (1600, 800)
            tall += image.width < image.height
    assert tall == 6  # on phones what is beside each other elsewhere


def test_the_plan_is_that_of_the_conversion(page, light):
    cells = Outline(page).cells
    plan = json.loads((light / "compression.json").read_text())
    assert f"<b>{plan['parameters_after'] / 1e6:.1f}M</b> of {plan['parameters_before'] / 1e6:.1f}M" in page
    for matrix in plan["matrices"]:
        row = cells.index(matrix["name"])
        assert cells[row + 1 : row + 3] == [f"{matrix['m']}×{matrix['n']}", matrix["setting"]]
        assert cells[row + 6] == f"{matrix['relative_error']:.4f}"
    feed_forward = cells.index("feed-forward")
    chosen = [matrix for matrix in plan["matrices"] if matrix["kind"] == "ffn"]
    before, after = (sum(matrix[f"parameters_{when}"] for matrix in chosen) for when in ("before", "after"))
    assert cells[feed_forward + 1 : feed_forward + 4] == [str(len(chosen)), f"{before:,}", f"{after:,}"]


def test_translations_are_those_of_both_models(page, light, tiny_marian, parallel_sentences):
    cells = Outline(page).cells
    sources = [pair["de"] for pair in parallel_sentences]
    beams = json.loads((light / "generation_config.json").read_text()).get("num_beams", 1)  # for the teacher, too
    teacher, ours = (translate(sources, folder, num_beams=beams) for folder in (tiny_marian, light))
    shown = [cells[cells.index(source) : cells.index(source) + 4] for source in sources]
    assert [row[1] for row in shown] == [pair["en"] for pair in parallel_sentences]
    assert [row[2] for row in shown] == teacher
    assert [row[3] for row in shown] == [" ".join(text.split()) for text in ours]


def test_what_differs_is_marked():
    assert _mark_differences("a b c d", "a x c") == [("a", False), ("x", True), ("c", False)]
    assert _mark_differences("a b", "a b") == [("a b", False)]
    assert _mark_differences(None, "a  b") == [("a b", False)]


def test_text_of_data_and_paths_of_machines_stay_harmless(page):
    assert FOREIGN not in page
    assert FOREIGN in Outline(page).cells
    assert "somebody" not in page


def test_results_become_a_table_with_the_teacher_once(page):
    cells = Outline(page).cells
    start = cells.index("teacher")
    assert cells[start : start + 18] == [
        "teacher", "40.0", "50.0", "9,000,000", "36.0", "1.00",
        "r2", "39.0", "49.0", "4,500,000", "18.0", "1.50",
        "r4", "35.5", "45.5", "2,250,000", "9.0", "2.10",
    ]  # fmt: skip


@pytest.fixture
def no_pictures(monkeypatch):
    """They are not drawn, which takes a second."""
    monkeypatch.setattr("lightformers_hf.evaluation.page.save_picture", lambda *_, **__: None)


@pytest.mark.usefixtures("no_pictures")
def test_engines_become_a_table(light, tmp_path):
    names, forms = ["teacher", "a/<b>"], ["ctranslate2", "ctranslate2-int8"]
    deployed = [
        Deployed(name, form, "/somebody", 4_000_000, {"bleu": 30.0, "chrf": 50.0}) for name in names for form in forms
    ]
    timings = [Timing(place.model, place.form, 1, 1, 1, Speed(90.0, [90.0] * 3, 9), 2.0, 3.0) for place in deployed]
    found = EngineComparison(names, deployed, timings, 25, 9, "/somebody/test.jsonl", 1, 11, {"bleu": "nrefs:1"})
    file = tmp_path / "engines.json"
    content = found.to_dict()
    for place in content["deployed"]:
        del place["differences"]  # as in files of version 0.2.0
    file.write_text(json.dumps(content))
    page = report_page(str(light), results=[file])
    outline = Outline(page)
    assert "Deployed: 1 core, batch 1, beam 1" in outline.headings
    start = outline.cells.index("ctranslate2-int8")
    assert outline.cells[start : start + 8] == [
        "ctranslate2-int8", "teacher", "90", "2.00x", "3.00x", "4.0", "30.0", "50.0",
    ]  # fmt: skip
    assert "a/<b>" in outline.cells
    assert "11 sentences of test.jsonl, beam 1" in page
    assert "somebody" not in page
    for damaged in ({"timings": []}, {"deployed": []}, {"timings": 3}):
        file.write_text(json.dumps(found.to_dict() | damaged))
        with pytest.raises(ValueError, match=r"engines\.json holds no results"):
            report_page(str(light), results=[file])


def test_errors_stand_at_their_layers():
    def matrix(name, kind, error):
        return MatrixReport(
            name=name, kind=kind, m=4, n=4, form="low-rank", size=1, setting="rank 1", parameters_after=8, energy=0.5,
            relative_error=error,
        )  # fmt: skip

    matrices = [
        matrix("shared", "embedding", 0.9),
        matrix("encoder.layers.0.self_attn.q_proj", "attention", 0.1),
        matrix("encoder.layers.0.self_attn.k_proj", "attention", 0.3),
        matrix("encoder.layers.2.fc1", "ffn", 0.5),
        matrix("decoder.layers.1.encoder_attn.v_proj", "attention", 0.7),
    ]
    encoder, decoder = Figure().subplots(1, 2)
    plots.errors([encoder, decoder], matrices)
    drawn = [{line.get_label(): line.get_xydata().tolist() for line in axes.lines} for axes in (encoder, decoder)]
    assert drawn[0]["self-attention"] == [[1, pytest.approx(0.2)]]
    assert drawn[0]["feed-forward"] == [[3, 0.5]]
    assert drawn[1]["cross-attention"] == [[2, 0.7]]
    dots = {tuple(point) for line in encoder.lines if line.get_marker() == "o" for point in line.get_xydata().tolist()}
    assert dots == {(1, 0.1), (1, 0.3), (3, 0.5)}
    assert all(drawn[place]["embedding"][0][1] == 0.9 for place in (0, 1))


def test_training_curves_are_the_logged_ones(light):
    log = json.loads((light / "trainer_state.json").read_text())["log_history"]
    losses, qualities = plots.training_curves(log)
    assert losses == {"loss": [(10, 1.0), (20, 0.5), (30, 10 / 30)], "eval_loss": [(20, 0.6)]}
    assert qualities == {"bleu": [(20, 31.0)]}


@pytest.mark.usefixtures("no_pictures")
def test_a_page_shows_what_there_is(light, tmp_path):
    headings = Outline(report_page(str(light))).headings
    assert headings == ["Error of every layer", "Training", "Plan"]
    shutil.copytree(light, tmp_path / "trained")
    file = tmp_path / "trained" / "compression.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"features": [32, 64]}))
    assert "The hidden states keep 32 of 64 features (d_model)" in report_page(str(tmp_path / "trained"))
    file.unlink()
    assert Outline(report_page(str(tmp_path / "trained"))).headings == ["Training"]


@pytest.mark.usefixtures("no_pictures")
def test_what_does_not_belong_together_is_refused(light, tiny_marian, tmp_path):
    with pytest.raises(ValueError, match=r"holds neither compression\.json nor trainer_state\.json"):
        report_page(str(tiny_marian))
    with pytest.raises(ValueError, match=r"teacher needs data: give data, too, or remove teacher"):
        report_page(str(light), teacher=str(tiny_marian))
    with pytest.raises(ValueError, match="metrics needs results"):
        report_page(str(light), metrics=["bleu"])
    with pytest.raises(FileNotFoundError, match=r"none\.json is not there"):
        report_page(str(light), results=[tmp_path / "none.json"])
    with pytest.raises(ValueError, match=r"compression\.json holds no results"):
        report_page(str(light), results=[light / "compression.json"])
    one = results_file(tmp_path / "one.json", "r2", 39.0, 4_500_000, 75.0)
    other = results_file(tmp_path / "other.json", "r4", 35.0, 2_000_000, 75.0, sentences=12)
    with pytest.raises(ValueError, match=r"11 sentences of test\.jsonl, num_beams 4 and of 12 sentences"):
        report_page(str(light), results=[one, other])
    shutil.copytree(light, tmp_path / "damaged")
    (tmp_path / "damaged" / "compression.json").write_text("{")
    with pytest.raises(ValueError, match=r"compression\.json is damaged"):
        report_page(str(tmp_path / "damaged"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_alone(page, tmp_path, browser, scheme):
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    shown = browser.new_page(viewport={"width": 800, "height": 900}, color_scheme=scheme)
    requests, complaints = [], []
    shown.on("request", lambda request: requests.append(request.url))
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.goto(file.as_uri())
    assert [address for address in requests if not address.startswith("data:")] == [file.as_uri()]
    assert complaints == []
    assert shown.title() == "light"
    assert shown.evaluate("[...document.images].map(image => image.complete && image.naturalWidth)") == [1600] * 3
    assert shown.get_by_text(FOREIGN).count() == 1

    # The pictures' background is the page's, and they are those of the scheme.
    red, green, blue = map(int, re.findall(r"\d+", shown.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert (red + green + blue < 100) == (scheme == "dark")
    for address in shown.evaluate("[...document.images].map(image => image.currentSrc)"):
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
            assert image.convert("RGB").getpixel((2, 2)) == (red, green, blue)

    for width in (800, 360):
        shown.set_viewport_size({"width": width, "height": 900})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.get_by_text("Every matrix", exact=True).click()
    assert shown.get_by_text("encoder.layers.0.fc1").is_visible()


@pytest.mark.usefixtures("no_pictures")
def test_two_seeds_of_a_model_are_two_rows(light, tiny_marian, data, tmp_path):
    results = [
        results_file(tmp_path / f"{seed}.json", "recovered", bleu, 4_500_000, 75.0, teacher=True)
        for seed, bleu in enumerate((39.0, 38.0))
    ]
    cells = Outline(report_page(str(light), results=results)).cells
    assert [cells[place + 1] for place, cell in enumerate(cells) if cell == "recovered"] == ["39.0", "38.0"]
    assert cells.count("40.0") == 1


@pytest.mark.usefixtures("no_pictures")
def test_the_metric_that_is_drawn_is_chosen(light, tmp_path):
    file = results_file(tmp_path / "r.json", "recovered", 39.0, 4_500_000, 75.0, teacher=True)
    cells = Outline(report_page(str(light), results=[file], metrics=["chrf"])).cells
    assert cells[cells.index("recovered") + 1] == "49.0"
    assert "BLEU" not in cells
    with pytest.raises(ValueError, match="do not all have cer, only bleu, chrf: evaluate"):
        report_page(str(light), results=[file], metrics=["cer"])
