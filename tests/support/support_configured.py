"""Small models for tests, each made from a configuration file. No code of ours names their architectures."""

import json

import msgspec

from shardlab.files import files, plugin_source
from shardlab.matrix.cell import Cell
from shardlab.matrix.model_file import ModelByConfiguration, read_model
from shardlab.plugins.plugin_kind import WORKLOADS
from trainers import menu

LANGUAGE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**LANGUAGE, "num_key_value_heads": 2, "max_position_embeddings": 128}
SEQ_LEN = 24
CONFIGURATIONS = {
    "llama": {"architectures": ["LlamaForCausalLM"], **GROUPED},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, **GROUPED},
    # the sliding window is shorter than SEQ_LEN, so that it has an effect
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 8, **GROUPED},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "hidden_dropout": 0.1, "max_position_embeddings": 64, **LANGUAGE},
    "bert": {"architectures": ["BertForMaskedLM"], "max_position_embeddings": 64, **LANGUAGE},
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
        **{key: value for key, value in LANGUAGE.items() if key != "vocab_size"},
    },
}


def write(folder, model_type, **changed):
    """Write a configuration file of an architecture. Returns the file's name without its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": model_type, **CONFIGURATIONS.get(model_type, {}), **changed}
    (folder / f"my-{model_type}.json").write_text(json.dumps(content))
    return f"my-{model_type}.json"


def model_of(folder, model_type, **changed):
    """Write a configuration file of an architecture into `folder`. Returns the model that a matrix file in `folder` gets if it
    names this file."""
    seq_len = None if model_type in ("vit", "resnet") else SEQ_LEN
    return read_model(ModelByConfiguration(transformers=write(folder, model_type, **changed), seq_len=seq_len), folder)


def described(folder, model):
    """What `describe` reports about a model that is given by its configuration. Imports torch."""
    from trainers.description import describe

    folder = folder / model.name
    plugin_source.write_plugin(folder, model.source)
    found = describe.describe_file(folder / model.source.file.name, model.seq_len)
    for known in found.plugins:
        menu.add_own_workload(known, folder / known.file)
    return found


def use(run_dir, model, known, **options):
    """Change the files of a run folder so that the run trains `model` instead of the workload that the folder was made for."""
    run = run_dir.read_run()
    defaults = {option.name: option.default for option in (*menu.find_strategy(run.cell.strategy).options, *known.options)}
    cell: Cell = msgspec.structs.replace(
        run.cell, workload=known.name, seq_len=known.seq_len, workload_code=known.code, options=defaults | options
    )
    files.write_json(run_dir.run_json, msgspec.structs.replace(run, cell=cell, cell_hash=cell.hash(), own_workload=known))
    plugin_source.write_plugin(run_dir.path / WORKLOADS.folder, model.source)
