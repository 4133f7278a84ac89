"""GlobalMetadata, the first message of a file, and the job it describes."""

from typing import Any

import msgspec

from onerank.ir.chakra.attributes import encode_attribute, variant_of
from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata
from onerank.ir.errors import ChakraError
from onerank.ir.job import Annotation, Compilation, InferenceStep, Job, Module
from onerank.ir.measurement import Device, Measurement
from onerank.ir.world import Pipeline, ProcessGroup, RankClass, World

VERSION = "1.0.0"
"""Version that Chakra's own generator writes."""

SCHEMA = "onerank 1"
"""Value of the attribute `schema` in onerank's files."""

SECTIONS: dict[str, tuple[str, Any]] = {
    "world": ("world", World),
    "rank": ("rank", int),
    "process_groups": ("groups", tuple[ProcessGroup, ...]),
    "device": ("device", Device),
    "measurement": ("measurement", Measurement),
    "annotations": ("annotations", tuple[Annotation, ...]),
    "modules": ("modules", tuple[Module, ...]),
    "pipeline": ("pipeline", Pipeline | None),
    "rank_classes": ("classes", tuple[RankClass, ...]),
    "compilation": ("compilation", Compilation | None),
    "inference": ("inference", InferenceStep | None),
    "host_factor": ("host_factor", float),
}
"""Attribute -> (field of `Job`, its type); each is a JSON text."""


def encode_job(job: Job) -> bytes:
    """Return the metadata message for a job.

    Raises:
        ChakraError: a value of the job has no JSON form.
    """
    metadata = GlobalMetadata(version=VERSION)
    metadata.attr.add(name="schema", string_val=SCHEMA)
    for name, text in _sections(job).items():
        metadata.attr.add(name=name, string_val=text)
    return metadata.SerializeToString()


def decode_job(message: bytes, place: str) -> Job:
    """Return the job that a metadata message describes.

    In another tool's file, an attribute that happens to share its name with a onerank attribute is
    ignored.

    Raises:
        ChakraError: an attribute of a onerank file has an unexpected value, or a newer onerank
            wrote the file. The message begins with `place`.
    """
    attributes = {stored.name: stored for stored in GlobalMetadata.FromString(message).attr}
    schema = attributes.get("schema", AttributeProto()).string_val
    if schema.startswith("onerank ") and schema != SCHEMA:
        raise ChakraError(
            f"{place}: the file has schema {schema!r}, this onerank reads {SCHEMA!r};"
            " use the version of onerank that wrote it",
            code="chakra-newer-schema",
        )
    job_fields: dict[str, Any] = {}
    for name, (field, kind) in SECTIONS.items():
        stored = attributes.get(name)
        if stored is None:
            continue
        try:
            job_fields[field] = _decode(stored, kind)
        except (TypeError, RecursionError, msgspec.MsgspecError) as error:
            if schema == SCHEMA:
                raise ChakraError(
                    f"{place}: metadata attribute {name!r} is not what onerank writes there:"
                    f" {error}; another version of onerank wrote the file, or it was edited:"
                    " capture or convert it again",
                    code="chakra-edited-metadata",
                ) from error
    return Job(**job_fields)


def amend_job(message: bytes, read: Job, job: Job) -> bytes:
    """Return a metadata message updated from one job to another; the rest stays unchanged.

    Args:
        message: the metadata as another tool wrote it.
        read: the job that `message` describes.
        job: the job that the result describes.
    """
    before, after = _sections(read), _sections(job)
    metadata = GlobalMetadata.FromString(message)
    for name in dict.fromkeys([*before, *after]):
        # A section that the job no longer has becomes null. Deleting it could reveal an earlier
        # attribute of the same name, which readers would take instead.
        text = after.get(name, "null")
        if text != before.get(name):
            # Readers take the last of several attributes with one name.
            last = next((entry for entry in reversed(metadata.attr) if entry.name == name), None)
            if last is not None and variant_of(last) == "string_val":
                last.string_val = text
            else:
                metadata.attr.append(AttributeProto(name=name, string_val=text))
    return metadata.SerializeToString()


def is_encoded_job(message: bytes, job: Job) -> bool:
    """Return whether the message is exactly what `encode_job` writes for the job."""
    return message == encode_job(job)


def has_onerank_schema(message: bytes) -> bool:
    """Return whether the metadata has onerank's `schema` attribute."""
    return encode_attribute("schema", "string_val", SCHEMA) in message


def _decode(stored: AttributeProto, kind: Any) -> Any:
    variant = variant_of(stored)
    if variant != "string_val":
        raise TypeError(f"its type is {variant or 'not set'}, not string_val")
    return msgspec.json.decode(stored.string_val, type=kind)


def _sections(job: Job) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, (field, _) in SECTIONS.items():
        value = getattr(job, field)
        if value is None or (field == "host_factor" and value == 1):  # the measured host
            continue
        try:
            texts[name] = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, OverflowError) as error:
            raise ChakraError(
                f"the job's {field} has no JSON form: {error}; use plain numbers, texts, lists"
                " and mappings",
                code="chakra-job-not-json",
            ) from error
    return texts
