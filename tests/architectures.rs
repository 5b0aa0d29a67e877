//! Every architecture as a tiny random model, from a Hugging Face directory and from GGUF, against an independent NumPy decoder
//! (tests/golden/make_architectures.py), on the CPU and on the software GPU.

mod support;

use engine::chat_template::ChatTemplate;
use engine::kernels::Activations;
use engine::model_file::{ModelFile, StorageType};
use engine::model_runner::StepRunner;
use engine::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::Path;
use support::driver::{Fed, logits_of, on_cpu, on_gpu};
use support::gguf_writer::{self, Meta, Stored, store};
use support::tiny_directory::{TinyTensor, golden, tensors, write};

fn ids(golden: &Value) -> Vec<u32> {
    golden["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The last token's logits: of a prefill at once, of one in chunks, and of a decode after a prefill.
fn check(label: &str, runner: &mut dyn StepRunner, ids: &[u32], model: &Value, bound: f64) {
    let expected: Vec<f64> = model["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    let at_once = Fed::in_order(64).prefill(runner, ids, 64);
    let in_chunks = Fed::in_order(64).prefill(runner, ids, 5);
    let mut sequence = Fed::in_order(64);
    let (last, before) = ids.split_last().unwrap();
    sequence.prefill(runner, before, 64);
    let decoded = logits_of(sequence.feed(runner, &[*last], true, engine::batch::Choice::Logits));
    for (way, got) in [("at once", at_once), ("in chunks", in_chunks), ("decoded", decoded)] {
        assert_eq!(got.len(), expected.len());
        let off =
            got.iter().zip(&expected).map(|(got, expected)| (f64::from(*got) - expected).abs()).fold(0.0, f64::max);
        println!("{label} {way}: off by {off:.5}");
        assert!(off <= bound, "{label} {way}: a logit is off by {off}, bound {bound}");
    }
}

/// What an f16 cache and f32 sums make of logits of up to 14.
const BOUND: f64 = 0.03;

#[test]
fn directories_of_every_architecture_give_the_golden_logits() {
    let golden = golden();
    let gpu = support::gpu();
    let models = golden["models"].as_object().unwrap();
    assert_eq!(models.len(), 9);
    for (number, (name, model)) in models.iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        // Every other one is in two files.
        write(directory.path(), model, "F32", number % 2 == 1);
        check(&format!("{name} on the cpu"), on_cpu(directory.path(), 512).as_mut(), &ids(&golden), model, BOUND);
        if let Some(gpu) = &gpu {
            let mut runner = on_gpu(gpu, directory.path(), 512, Activations::F32);
            check(&format!("{name} on the gpu"), runner.as_mut(), &ids(&golden), model, BOUND);
        }
    }
}

#[test]
fn a_directory_in_bf16_is_read_with_its_tokeniser_and_template() {
    let golden = golden();
    let model = &golden["models"]["qwen3"];
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), model, "BF16", false);
    check("bf16", on_cpu(directory.path(), 512).as_mut(), &ids(&golden), model, 0.4);
    let file = ModelFile::open(directory.path()).unwrap();
    let tokenizer = Tokenizer::of(&file).unwrap();
    let ids = tokenizer.encode("Hi there<eos>", true).unwrap();
    assert_eq!((tokenizer.decode(&ids).as_str(), ids.last()), ("Hi there<eos>", Some(&95)));
    assert_eq!((tokenizer.eos_token_ids(), tokenizer.is_control(95), tokenizer.vocab_size()), (&[95][..], true, 96));
    let template = ChatTemplate::of(&file, &tokenizer).unwrap().unwrap();
    let messages = serde_json::json!([{ "role": "user", "content": "said" }]);
    assert_eq!(template.render(&messages, true).unwrap(), "said");
}

/// A tensor as GGUF's converter writes it: its own name, heads reordered for neighbouring pairs, norms with their one added.
fn converted(tensor: TinyTensor, architecture: &str) -> Stored {
    let TinyTensor { name, shape, mut values } = tensor;
    let is_gemma = architecture.starts_with("gemma");
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let new = match (name.as_str(), layer) {
        ("model.embed_tokens.weight", _) => "token_embd.weight".to_owned(),
        ("model.norm.weight", _) => "output_norm.weight".to_owned(),
        ("lm_head.weight", _) => "output.weight".to_owned(),
        (_, Some((layer, part))) => {
            let part = match part.strip_suffix(".weight").unwrap() {
                "input_layernorm" => "attn_norm",
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "self_attn.q_norm" => "attn_q_norm",
                "self_attn.k_norm" => "attn_k_norm",
                "post_attention_layernorm" => {
                    if is_gemma {
                        "post_attention_norm"
                    } else {
                        "ffn_norm"
                    }
                }
                "pre_feedforward_layernorm" => "ffn_norm",
                "post_feedforward_layernorm" => "post_ffw_norm",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                other => panic!("{other}"),
            };
            format!("blk.{layer}.{part}.weight")
        }
        (other, None) => panic!("{other}"),
    };
    if is_gemma && new.contains("norm") {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
    let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
    if architecture == "llama" && (new.contains("attn_q.") || new.contains("attn_k.")) {
        let head = 16;
        let source = values.clone();
        for row in 0..rows {
            // Row 2·i of a head is row i, row 2·i + 1 is row i + 8.
            let (first, within) = (row / head * head, row % head);
            let from = first + within / 2 + within % 2 * (head / 2);
            values[row * columns..][..columns].copy_from_slice(&source[from * columns..][..columns]);
        }
    }
    store(&new, StorageType::F32, rows, columns, &values)
}

/// A metadata key behind the architecture's name.
type Key = (&'static str, Meta);

fn write_gguf(path: &Path, model: &Value, architecture: &'static str, more: &[Key]) {
    let config = &model["config"];
    let number = |key: &str| config[key].as_u64().unwrap() as u32;
    let key = |name: &str| -> &'static str { format!("{architecture}.{name}").leak() };
    let mut metadata = vec![
        ("general.architecture", Meta::Str(architecture)),
        (key("block_count"), Meta::U32(number("num_hidden_layers"))),
        (key("context_length"), Meta::U32(512)),
        (key("embedding_length"), Meta::U32(number("hidden_size"))),
        (key("feed_forward_length"), Meta::U32(number("intermediate_size"))),
        (key("attention.head_count"), Meta::U32(number("num_attention_heads"))),
        (key("attention.head_count_kv"), Meta::U32(number("num_key_value_heads"))),
        (key("attention.layer_norm_rms_epsilon"), Meta::F32(1e-5)),
        ("tokenizer.ggml.tokens", Meta::Strings((0..number("vocab_size")).map(|id| id.to_string()).collect())),
    ];
    if let Some(head_dim) = config["head_dim"].as_u64() {
        metadata.push((key("attention.key_length"), Meta::U32(head_dim as u32)));
    }
    metadata.extend(more.iter().map(|(name, value)| {
        let value = match value {
            Meta::U32(value) => Meta::U32(*value),
            Meta::F32(value) => Meta::F32(*value),
            Meta::Str(text) => Meta::Str(text),
            _ => panic!("not used here"),
        };
        (key(name), value)
    }));
    let stored: Vec<Stored> = tensors(model).into_iter().map(|tensor| converted(tensor, architecture)).collect();
    gguf_writer::write(path, &gguf_writer::gguf(&metadata, &stored));
}

#[test]
fn gguf_files_as_the_converter_writes_them_give_the_same_logits() {
    let golden = golden();
    let linear = [("rope.scaling.type", Meta::Str("linear")), ("rope.scaling.factor", Meta::F32(4.0))];
    let capped = [
        ("attention.sliding_window", Meta::U32(8)),
        ("attn_logit_softcapping", Meta::F32(5.0)),
        ("final_logit_softcapping", Meta::F32(3.0)),
        ("attention.scale", Meta::F32(1.0 / 40f32.sqrt())),
    ];
    let cases: [(&str, &'static str, &[Key]); 3] =
        [("llama-linear", "llama", &linear), ("gemma2", "gemma2", &capped), ("qwen3", "qwen3", &[])];
    for (name, architecture, more) in cases {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny.gguf");
        let model = &golden["models"][name];
        write_gguf(&path, model, architecture, more);
        check(&format!("{name} in GGUF"), on_cpu(&path, 512).as_mut(), &ids(&golden), model, BOUND);
    }
}
