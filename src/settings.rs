//! Settings: `pagoda.toml` in the working directory, then `PAGODA_*`, then flags; the later wins.
//!
//! Every setting has one name in three spellings: `max-num-seqs` in the file's `snake_case` (`max_num_seqs`),
//! `PAGODA_MAX_NUM_SEQS`, `--max-num-seqs`. An unknown key in the file is an error.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use engine::config::EngineConfig;
use engine::kernels::Activations;
use engine::ops::wgpu::MAX_DEVICE_LOGPROBS;
use engine::server::{ApiKeys, ServerConfig};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};

/// The file that is read where it exists.
const FILE: &str = "pagoda.toml";

/// Flags of the engine. Absent ones leave what the file or the environment says.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct EngineFlags {
    /// GGUF file; without it, the default model (fetched when it is not there).
    #[arg(long, value_name = "FILE")]
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
    /// Activations of matrix products on a GPU: f32, or int8 in blocks of 32. [default: by the adapter]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<ActivationsFlag>,
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
    port: Option<u16>,
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
    /// Address of the internal listener, HOST:PORT. [default: 127.0.0.1, one above --port]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    internal_listen: Option<String>,
    /// File of the token that the cluster's members share; wanted where --internal-listen is not loopback.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_token_file: Option<PathBuf>,
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

/// Spellings of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationsFlag {
    /// As they are.
    F32,
    /// Rounded.
    Int8,
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

/// All settings, merged.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// GGUF file.
    pub model: Option<PathBuf>,
    /// Device name.
    pub device: String,
    max_model_len: Option<usize>,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    kv_cache_memory: Option<Bytes>,
    gpu_memory_utilization: Option<f64>,
    enable_prefix_caching: bool,
    max_step_ms: f64,
    activations: Option<ActivationsFlag>,
    threads: Option<usize>,
    /// Address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Names of the model.
    #[serde(deserialize_with = "one_or_many")]
    pub served_model_name: Vec<String>,
    /// CORS origins.
    #[serde(deserialize_with = "one_or_many")]
    pub allowed_origins: Vec<String>,
    max_queue: usize,
    #[serde(deserialize_with = "one_or_many")]
    api_key: Vec<String>,
    api_key_file: Option<PathBuf>,
    /// Certificate chain.
    pub ssl_certfile: Option<PathBuf>,
    /// Its key.
    pub ssl_keyfile: Option<PathBuf>,
    max_logprobs: usize,
    max_request_time: Option<f64>,
    internal_listen: Option<String>,
    cluster_token_file: Option<PathBuf>,
    /// Where traces go.
    pub otlp_traces_endpoint: Option<String>,
    max_body_bytes: Bytes,
    /// Seconds.
    pub shutdown_timeout: u64,
    /// Log format.
    pub log_format: LogFormat,
}

impl Default for Settings {
    fn default() -> Self {
        let engine = EngineConfig::new(PathBuf::new(), engine::device::AUTO);
        Self {
            model: None,
            device: engine.device,
            max_model_len: None,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            kv_cache_memory: None,
            gpu_memory_utilization: None,
            enable_prefix_caching: engine.enable_prefix_caching,
            max_step_ms: engine.max_step_ms,
            activations: None,
            threads: None,
            host: "127.0.0.1".into(),
            port: 8000,
            served_model_name: Vec::new(),
            allowed_origins: Vec::new(),
            max_queue: engine.max_queue,
            api_key: Vec::new(),
            api_key_file: None,
            ssl_certfile: None,
            ssl_keyfile: None,
            max_logprobs: 20,
            max_request_time: None,
            internal_listen: None,
            cluster_token_file: None,
            otlp_traces_endpoint: None,
            max_body_bytes: Bytes::Number(16 << 20),
            shutdown_timeout: 30,
            log_format: LogFormat::Text,
        }
    }
}

/// A size: a number, or a text with a unit.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Bytes {
    Number(u64),
    Text(String),
}

impl Bytes {
    fn parse(&self) -> Result<u64> {
        match self {
            Self::Number(bytes) => Ok(*bytes),
            Self::Text(text) => parse_bytes(text),
        }
    }
}

/// A list, or the one text that an environment variable gives.
fn one_or_many<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        // What looks like a number in the environment is read as one.
        Number(u64),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(text) => text.split(',').map(|part| part.trim().to_owned()).collect(),
        OneOrMany::Number(number) => vec![number.to_string()],
        OneOrMany::Many(texts) => texts,
    })
}

/// Names that are read from the environment. Others are left alone: Kubernetes sets `PAGODA_SERVICE_HOST` and more beside
/// a service called `pagoda`.
const NAMES: [&str; 28] = [
    "model",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "max_step_ms",
    "activations",
    "threads",
    "host",
    "port",
    "served_model_name",
    "allowed_origins",
    "max_queue",
    "api_key",
    "api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "max_logprobs",
    "max_request_time",
    "internal_listen",
    "cluster_token_file",
    "otlp_traces_endpoint",
    "max_body_bytes",
    "shutdown_timeout",
    "log_format",
];

impl Settings {
    /// Merges the file, the environment and the flags.
    ///
    /// # Errors
    /// When a value is of the wrong type or a key is unknown; the error names it and where it stands.
    pub fn load(engine: &EngineFlags, server: &ServerFlags) -> Result<Self> {
        let environment = Env::prefixed("PAGODA_").only(&NAMES);
        let figment = Figment::from(Serialized::defaults(Self::default()))
            .merge(Toml::file(FILE))
            .merge(environment)
            .merge(Serialized::defaults(engine))
            .merge(Serialized::defaults(server));
        let settings: Self = figment.extract().context("settings")?;
        if let Some(threads) = settings.threads {
            rayon_threads(threads)?;
        }
        Ok(settings)
    }

    /// The engine's part, for a model file.
    ///
    /// # Errors
    /// When a size cannot be read.
    pub fn engine(&self, model: PathBuf, served_model_name: &str) -> Result<EngineConfig> {
        if !(self.max_step_ms > 0.0 && self.max_step_ms.is_finite()) {
            bail!("--max-step-ms {}: must be above 0", self.max_step_ms);
        }
        let kv_cache_bytes =
            self.kv_cache_memory.as_ref().map(Bytes::parse).transpose().context("--kv-cache-memory")?;
        Ok(EngineConfig {
            model,
            device: self.device.clone(),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            kv_cache_bytes,
            max_queue: self.max_queue,
            max_step_ms: self.max_step_ms,
            enable_prefix_caching: self.enable_prefix_caching,
            gpu_memory_utilization: self.gpu_memory_utilization,
            served_model_name: served_model_name.to_owned(),
            fingerprint_cache: crate::pull::cache_directory().ok().map(|directory| directory.join("fingerprints")),
            activations: self.activations.map(|flag| match flag {
                ActivationsFlag::F32 => Activations::F32,
                ActivationsFlag::Int8 => Activations::Int8,
            }),
        })
    }

    /// The server's part, for these names of the model.
    ///
    /// # Errors
    /// When a value cannot be read or makes no sense.
    pub fn server(&self, served_model_names: Vec<String>) -> Result<ServerConfig> {
        let max_body_bytes = self.max_body_bytes.parse().context("--max-body-bytes")?;
        if self.max_logprobs > MAX_DEVICE_LOGPROBS {
            bail!("--max-logprobs {}: at most {MAX_DEVICE_LOGPROBS} are possible", self.max_logprobs);
        }
        let max_request_time = match self.max_request_time {
            Some(seconds) if !(seconds > 0.0 && seconds <= 1e6) => {
                bail!("--max-request-time {seconds}: must be above 0, at most 1000000 seconds")
            }
            Some(seconds) => Some(Duration::from_secs_f64(seconds)),
            None => None,
        };
        Ok(ServerConfig {
            served_model_names,
            allowed_origins: self.allowed_origins.clone(),
            max_body_bytes: usize::try_from(max_body_bytes).unwrap_or(usize::MAX),
            api_keys: self.api_keys()?,
            max_logprobs: self.max_logprobs,
            max_request_time,
        })
    }

    fn api_keys(&self) -> Result<ApiKeys> {
        let mut keys = ApiKeys::default();
        for key in &self.api_key {
            keys.add(None, key).map_err(|error| anyhow!(error)).context("--api-key")?;
        }
        if let Some(path) = &self.api_key_file {
            keys.add_file(path).map_err(|error| anyhow!(error)).context("--api-key-file")?;
        }
        Ok(keys)
    }

    /// Where the internal listener listens.
    pub fn internal_address(&self) -> String {
        let port = if self.port == 0 { 0 } else { self.port.wrapping_add(1) };
        self.internal_listen.clone().unwrap_or_else(|| format!("127.0.0.1:{port}"))
    }

    /// The token that the internal listener wants at `address`.
    ///
    /// # Errors
    /// When it cannot be read, or is missing where others than this machine can reach the listener.
    pub fn cluster_token(&self, address: SocketAddr) -> Result<Option<String>> {
        let Some(path) = &self.cluster_token_file else {
            if address.ip().is_loopback() {
                return Ok(None);
            }
            bail!("--internal-listen {address} can be reached from other machines: it wants --cluster-token-file");
        };
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string());
        let token = text.context("--cluster-token-file")?.trim().to_owned();
        if token.is_empty() {
            bail!("--cluster-token-file {}: is empty", path.display());
        }
        Ok(Some(token))
    }
}

fn rayon_threads(threads: usize) -> Result<()> {
    if threads == 0 {
        bail!("--threads 0: at least one is needed");
    }
    engine::ops::cpu::use_threads(threads).context("--threads")
}

/// `512`, `512K`, `512MiB`, ...: binary multiples.
fn parse_bytes(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        other => bail!("`{text}`: unknown unit `{other}`"),
    };
    let number: u64 = digits.trim().parse().with_context(|| format!("`{text}` is not a number of bytes"))?;
    number.checked_mul(1 << shift).with_context(|| format!("`{text}` is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(parse_bytes("512").unwrap(), 512);
        assert_eq!(parse_bytes("2GiB").unwrap(), 2 << 30);
        assert_eq!(parse_bytes("3m").unwrap(), 3 << 20);
        assert!(parse_bytes("1 parsec").is_err() && parse_bytes("-1").is_err() && parse_bytes("99999999999G").is_err());
    }

    #[test]
    fn every_setting_is_read_from_the_environment() {
        let settings = serde_json::to_value(Settings::default()).unwrap();
        let fields: Vec<&String> = settings.as_object().unwrap().keys().collect();
        assert_eq!(fields, NAMES);
    }

    #[test]
    fn sizes_and_lists_have_two_spellings() {
        let text = "kv_cache_memory = 1048576\nserved_model_name = 'a,b'\nmax_body_bytes = '4KiB'";
        let figment = Figment::from(Serialized::defaults(Settings::default())).merge(Toml::string(text));
        let settings: Settings = figment.extract().unwrap();
        assert_eq!(settings.engine(PathBuf::new(), "m").unwrap().kv_cache_bytes, Some(1 << 20));
        assert_eq!(
            (settings.server(Vec::new()).unwrap().max_body_bytes, settings.served_model_name),
            (4096, vec!["a".into(), "b".into()])
        );
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = Figment::from(Serialized::defaults(Settings::default())).merge(Toml::string("port = 9\nhost = 'h'"));
        let flags = ServerFlags { port: Some(10), ..Default::default() };
        let settings: Settings = file.merge(Serialized::defaults(&flags)).extract().unwrap();
        assert_eq!((settings.port, settings.host.as_str()), (10, "h"));
        let unknown = Figment::from(Serialized::defaults(Settings::default())).merge(Toml::string("prot = 9"));
        assert!(unknown.extract::<Settings>().unwrap_err().to_string().contains("prot"));
    }
}
