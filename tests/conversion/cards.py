"""Measurements as `lightformers evaluate` writes them."""

from lightformers_hf.evaluation.evaluate import Evaluation, Measurements


def evaluation_of(name: str, parameters: int, *, teacher: str | None = None, data: str = "test.jsonl") -> Evaluation:
    """Made-up measurements of a model with so many parameters, and of its teacher."""

    def measured(name, parameters, bleu, speed):
        return Measurements(
            name=name,
            scores={"bleu": bleu, "chrf": 62.5},
            parameters=parameters,
            disk_bytes=4 * parameters,
            memory_bytes=900_000_000,
            libraries_bytes=600_000_000,
            tokens_per_second=speed,
            tokens=1000,
        )

    return Evaluation(
        measured(name, parameters, 41.25, 150.0),
        measured(teacher, 2 * parameters, 42.0, 100.0) if teacher else None,
        speed_ratio=1.5 if teacher else None,
        data=data,
        source="de",
        target="en",
        sentences=1000,
        generation={"num_beams": 4},
        signatures={"bleu": "nrefs:1|case:mixed|tok:13a", "chrf": "nrefs:1|nc:6"},
    )
