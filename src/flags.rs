//! Flags of `pagoda run` and `pagoda serve`: the last of the three places that settings come from.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use engine::kernels::Activations;
use engine::kv::KvCacheDtype;
use engine::model_file::Quantize;
use serde::{Deserialize, Serialize};

/// Flags of the engine. Absent ones leave what the file or the environment says.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct EngineFlags {
    /// GGUF file, directory as Hugging Face lays it out, or hf:ORGANISATION/REPOSITORY[/FILE][@REVISION]; without it, the
    /// default model. What is not there is fetched.
    #[arg(long, value_name = "MODEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<PathBuf>,
    /// auto, cpu, an adapter of `pagoda devices` such as vulkan:0, or sim:PROFILE (a name or a TOML file). [default: auto]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// Longest sequence, prompt and answer. [default: the model's, cut to the KV cache]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
    /// Sequences that run at once. [default: 64]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_num_seqs: Option<usize>,
    /// Tokens of one step, over all sequences. [default: 512]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_num_batched_tokens: Option<usize>,
    /// Bytes of the KV cache, with K, M, G or KiB, MiB, GiB. [default: by the device's memory]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache_memory: Option<String>,
    /// How keys and values are stored: f16, or q8_0, which takes 8.5 bits a value. [default: f16]
    #[arg(long, value_enum, value_name = "TYPE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache_dtype: Option<KvCacheDtypeFlag>,
    /// Part of the device's memory to use, 0 to 1. [default: 0.9 of a discrete GPU's; else see --kv-cache-memory]
    #[arg(long, value_name = "PART")]
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_memory_utilization: Option<f64>,
    /// Start prompts with the KV blocks of earlier ones that begin alike. [default: true]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_prefix_caching: Option<bool>,
    /// Milliseconds that a step should take while streams run: bounds the prompt tokens beside them. [default: 100]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_step_ms: Option<f64>,
    /// Activations of matrix products on a GPU: f32, f16, or int8 in blocks of 32. [default: by the adapter]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<ActivationsFlag>,
    /// Round floating-point weights when they are loaded: q8_0 or q4_0. [default: as they are]
    #[arg(long, value_enum, value_name = "TYPE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    quantize: Option<QuantizeFlag>,
    /// What requests get where they do not say how tokens are chosen: what the model recommends, or OpenAI's defaults.
    /// [default: auto]
    #[arg(long, value_enum, value_name = "FROM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    generation_config: Option<GenerationConfigFlag>,
    /// Threads of the cpu device. [default: one a core]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
}

/// Flags of the server.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct ServerFlags {
    /// Address to listen on. [default: 127.0.0.1]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one. [default: 8000]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Names that requests may ask for. [default: the model file's name]
    #[arg(long, num_args = 1.., value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    served_model_name: Option<Vec<String>>,
    /// Origins whose web pages may call the API, * for all. [default: none]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "ORIGIN")]
    #[serde(skip_serializing_if = "Option::is_none")]
    allowed_origins: Option<Vec<String>>,
    /// Requests that may wait before others are refused with 429. [default: 1024]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_queue: Option<usize>,
    /// Key that opens the API; several may be given. Without any, all may call.
    #[arg(long, num_args = 1.., value_name = "KEY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key: Option<Vec<String>>,
    /// File of keys: a line each, KEY or NAME KEY.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key_file: Option<PathBuf>,
    /// Certificate chain of the server, PEM: serves HTTPS.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ssl_certfile: Option<PathBuf>,
    /// Key of the certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ssl_keyfile: Option<PathBuf>,
    /// Most log probabilities that a request may ask for, up to 128. [default: 20]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_logprobs: Option<usize>,
    /// Seconds after which any request fails. [default: none]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_request_time: Option<f64>,
    /// Address of the internal listener, HOST:PORT. [default: 127.0.0.1, 1000 above --port, or any port that is free]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    internal_listen: Option<String>,
    /// File of the token that the cluster's members share; wanted where --internal-listen is not loopback.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_token_file: Option<PathBuf>,
    /// Bytes of host memory for KV blocks that leave the device. [default: none]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_host_bytes: Option<String>,
    /// Directory for KV blocks that outlive the process; it belongs to one. [default: none]
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_disk: Option<PathBuf>,
    /// Most bytes in --kv-disk. [default: 10GiB]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_disk_bytes: Option<String>,
    /// A `pagoda cache serve` that keeps KV blocks for many engines: http://HOST:PORT or https://HOST:PORT. [default: none]
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_tier: Option<String>,
    /// Certificates that are trusted for an https --kv-tier, PEM.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_tier_cafile: Option<PathBuf>,
    /// How KV blocks are packed for disk and tier: saves a tenth, pays on links slower than 75 MB/s. [default: none]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_compression: Option<KvCompression>,
    /// Seconds after the last stream in which KV blocks are put down before the end. [default: 10]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_drain_timeout: Option<u64>,
    /// Where traces are sent: OTLP over HTTP, http://HOST:4318/v1/traces. [default: nowhere]
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_traces_endpoint: Option<String>,
    /// Largest request body. [default: 16MiB]
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_body_bytes: Option<String>,
    /// Seconds that running streams get to finish after SIGTERM. [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    shutdown_timeout: Option<u64>,
    /// How logs are written. [default: text]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,
}

/// Spellings of what weights are rounded to.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum QuantizeFlag {
    /// A byte a value.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8,
    /// Four bits a value.
    #[value(name = "q4_0")]
    #[serde(rename = "q4_0")]
    Q4,
}

impl From<QuantizeFlag> for Quantize {
    fn from(flag: QuantizeFlag) -> Self {
        match flag {
            QuantizeFlag::Q8 => Self::Q8_0,
            QuantizeFlag::Q4 => Self::Q4_0,
        }
    }
}

/// Where defaults of sampling come from.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum GenerationConfigFlag {
    /// `generation_config.json`, or the keys of a GGUF file.
    #[default]
    Auto,
    /// OpenAI's.
    #[value(alias = "vllm")]
    #[serde(alias = "vllm")]
    None,
}

/// Spellings of how keys and values are stored.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize, ValueEnum)]
pub enum KvCacheDtypeFlag {
    /// Two bytes a value.
    #[value(name = "f16", alias = "auto")]
    #[serde(rename = "f16", alias = "auto")]
    F16,
    /// A byte a value, and a scale for 32.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8,
}

impl From<KvCacheDtypeFlag> for KvCacheDtype {
    fn from(flag: KvCacheDtypeFlag) -> Self {
        match flag {
            KvCacheDtypeFlag::F16 => Self::F16,
            KvCacheDtypeFlag::Q8 => Self::Q8_0,
        }
    }
}

/// Spellings of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationsFlag {
    /// As they are.
    F32,
    /// Half precision for prompts, on matrix units where there are some.
    F16,
    /// Rounded.
    Int8,
}

impl From<ActivationsFlag> for Activations {
    fn from(flag: ActivationsFlag) -> Self {
        match flag {
            ActivationsFlag::F32 => Self::F32,
            ActivationsFlag::F16 => Self::F16,
            ActivationsFlag::Int8 => Self::Int8,
        }
    }
}

/// Packings of KV blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCompression {
    /// As they are.
    #[default]
    None,
    /// Zstandard over byte planes.
    Zstd,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One object a line.
    Json,
}
