//! Settings: `pagoda.toml` in the working directory, then `PAGODA_*`, then flags; the later wins.
//!
//! Every setting has one name in three spellings: `max-num-seqs` in the file's `snake_case` (`max_num_seqs`),
//! `PAGODA_MAX_NUM_SEQS`, `--max-num-seqs`. An unknown key in the file is an error.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use engine::config::EngineConfig;
use engine::ops::wgpu::MAX_DEVICE_LOGPROBS;
use engine::server::{ApiKeys, ServerConfig};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};

use crate::flags::{
    ActivationsFlag, EngineFlags, GenerationConfigFlag, KvCacheDtypeFlag, KvCompression, LogFormat, QuantizeFlag,
    ServerFlags,
};

/// The file that is read where it exists.
const FILE: &str = "pagoda.toml";

/// The internal listener's port, above the public one: engines on neighbouring ports do not meet.
const INTERNAL_PORT_OFFSET: u16 = 1000;

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
    /// Whether prompts may start with blocks that are there.
    pub enable_prefix_caching: bool,
    max_step_ms: f64,
    activations: Option<ActivationsFlag>,
    kv_cache_dtype: Option<KvCacheDtypeFlag>,
    quantize: Option<QuantizeFlag>,
    generation_config: GenerationConfigFlag,
    /// Of the CPU.
    pub threads: Option<usize>,
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
    #[serde(deserialize_with = "one_whole_or_many")]
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
    kv_host_bytes: Option<Bytes>,
    /// Directory of KV blocks.
    pub kv_disk: Option<PathBuf>,
    kv_disk_bytes: Option<Bytes>,
    /// URL of a KV tier.
    pub kv_tier: Option<String>,
    /// Certificates that are trusted for it.
    pub kv_tier_cafile: Option<PathBuf>,
    /// How KV blocks are packed for disk and tier.
    pub kv_compression: KvCompression,
    /// Seconds.
    pub kv_drain_timeout: u64,
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
            kv_cache_dtype: None,
            quantize: None,
            generation_config: GenerationConfigFlag::Auto,
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
            kv_host_bytes: None,
            kv_disk: None,
            kv_disk_bytes: None,
            kv_tier: None,
            kv_tier_cafile: None,
            kv_compression: KvCompression::None,
            kv_drain_timeout: 10,
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

/// Most bytes in the directory of KV blocks, where nothing else is asked for.
const DEFAULT_KV_DISK_BYTES: u64 = 10 << 30;

impl Bytes {
    fn parse(&self) -> Result<u64> {
        match self {
            Self::Number(bytes) => Ok(*bytes),
            Self::Text(text) => parse_bytes(text),
        }
    }
}

/// A list, or one text.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// A list, or the one text that an environment variable gives.
fn one_or_many<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(text) => text.split(',').map(|part| part.trim().to_owned()).collect(),
        OneOrMany::Many(texts) => texts,
    })
}

/// A list, or one text as it is: a key may hold any character.
fn one_whole_or_many<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(text) => vec![text],
        OneOrMany::Many(texts) => texts,
    })
}

/// Settings that are lists, and what separates their parts in an environment variable.
const LISTS: [(&str, char); 3] = [("api_key", ' '), ("served_model_name", ','), ("allowed_origins", ',')];

/// Names that are read from the environment. Others are left alone: Kubernetes sets `PAGODA_SERVICE_HOST` and more beside
/// a service called `pagoda`.
const NAMES: [&str; 38] = [
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
    "kv_cache_dtype",
    "quantize",
    "generation_config",
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
    "kv_host_bytes",
    "kv_disk",
    "kv_disk_bytes",
    "kv_tier",
    "kv_tier_cafile",
    "kv_compression",
    "kv_drain_timeout",
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
        let figment = Figment::from(Serialized::defaults(Self::default())).merge(Toml::file(FILE));
        let figment =
            from_environment(figment)?.merge(Serialized::defaults(engine)).merge(Serialized::defaults(server));
        let settings: Self = figment.extract().context("settings")?;
        settings.threads.map_or(Ok(()), rayon_threads)?;
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
        let cache = crate::pull::cache_directory().ok();
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
            generation_config: self.generation_config == GenerationConfigFlag::Auto,
            fingerprint_cache: cache.as_ref().map(|directory| directory.join("fingerprints")),
            pipeline_cache: cache.as_ref().map(|directory| directory.join("pipelines")),
            quantize: self.quantize.map(Into::into),
            kv_cache_dtype: self.kv_cache_dtype.map(Into::into).unwrap_or_default(),
            activations: self.activations.map(Into::into),
        })
    }

    /// The server's part, for these names of the model.
    ///
    /// # Errors
    /// When a value cannot be read or makes no sense.
    pub fn server(&self, served_model_names: Vec<String>) -> Result<ServerConfig> {
        let max_body_bytes = self.max_body_bytes.parse().context("--max-body-bytes")?;
        if max_body_bytes == 0 {
            bail!("--max-body-bytes 0: no request would fit");
        }
        if served_model_names.iter().any(String::is_empty) {
            bail!("--served-model-name: a name is empty");
        }
        if let Some(origin) = self.allowed_origins.iter().find(|origin| *origin != "*" && !origin.contains("://")) {
            bail!("--allowed-origins {origin}: should be like https://example.org, or *");
        }
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

    /// Whether the internal listener's address was asked for.
    pub fn names_internal_address(&self) -> bool {
        self.internal_listen.is_some()
    }

    /// Where the internal listener listens.
    pub fn internal_address(&self) -> String {
        let port = if self.port == 0 { 0 } else { self.port.checked_add(INTERNAL_PORT_OFFSET).unwrap_or(0) };
        self.internal_listen.clone().unwrap_or_else(|| format!("127.0.0.1:{port}"))
    }

    /// The token that the internal listener wants at `address`.
    ///
    /// # Errors
    /// When it cannot be read, or is missing where others than this machine can reach the listener.
    pub fn cluster_token(&self, address: SocketAddr) -> Result<Option<String>> {
        let token = self.read_cluster_token()?;
        check_reach("--internal-listen", address, token.is_some())?;
        Ok(token)
    }

    /// The cluster's token, where there is one.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_cluster_token(&self) -> Result<Option<String>> {
        self.cluster_token_file.as_deref().map(read_token).transpose()
    }

    /// Whether any KV tier is asked for.
    pub fn asks_for_tiers(&self) -> bool {
        self.kv_host_bytes().is_ok_and(|bytes| bytes.is_some()) || self.kv_disk.is_some() || self.kv_tier.is_some()
    }

    /// Bytes of host memory for KV blocks.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn kv_host_bytes(&self) -> Result<Option<u64>> {
        let bytes = self.kv_host_bytes.as_ref().map(Bytes::parse).transpose().context("--kv-host-bytes")?;
        Ok(bytes.filter(|&bytes| bytes > 0))
    }

    /// Most bytes in the directory of KV blocks.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn kv_disk_bytes(&self) -> Result<u64> {
        self.kv_disk_bytes.as_ref().map_or(Ok(DEFAULT_KV_DISK_BYTES), Bytes::parse).context("--kv-disk-bytes")
    }

    /// Refuses settings of tiers that are not there.
    ///
    /// # Errors
    /// When one has no effect.
    pub fn check_tiers(&self) -> Result<()> {
        if self.asks_for_tiers() && !self.enable_prefix_caching {
            bail!("--enable-prefix-caching false: KV tiers hold what prefix caching finds; leave one of them out");
        }
        if self.kv_disk_bytes.is_some() && self.kv_disk.is_none() {
            bail!("--kv-disk-bytes bounds the directory of --kv-disk, which is not given");
        }
        if self.kv_tier_cafile.is_some() && self.kv_tier.is_none() {
            bail!("--kv-tier-cafile is trusted for --kv-tier, which is not given");
        }
        if self.kv_compression != KvCompression::None && self.kv_disk.is_none() && self.kv_tier.is_none() {
            bail!("--kv-compression packs what goes to --kv-disk or --kv-tier, and neither is given");
        }
        Ok(())
    }
}

/// The token in a file.
pub fn read_token(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string());
    let token = text.context("--cluster-token-file")?.trim().to_owned();
    if token.is_empty() {
        bail!("--cluster-token-file {}: is empty", path.display());
    }
    Ok(token)
}

/// Refuses an address that other machines reach without a token.
pub fn check_reach(flag: &str, address: SocketAddr, has_token: bool) -> Result<()> {
    if !has_token && !address.ip().is_loopback() {
        bail!("{flag} {address} can be reached from other machines: it wants --cluster-token-file");
    }
    Ok(())
}

/// Merges `PAGODA_*`. Lists are taken as they are written, not as figment would read them: a key may look like a number.
fn from_environment(figment: Figment) -> Result<Figment> {
    let mut ignored: Vec<&str> = LISTS.iter().map(|(name, _)| *name).collect();
    // Kubernetes sets PAGODA_PORT beside a service called `pagoda`.
    if std::env::var("PAGODA_PORT").is_ok_and(|value| value.starts_with("tcp://")) {
        ignored.push("port");
    }
    let mut figment = figment.merge(Env::prefixed("PAGODA_").only(&NAMES).ignore(&ignored));
    for (name, separator) in LISTS {
        let variable = format!("PAGODA_{}", name.to_uppercase());
        let Some(value) = std::env::var_os(&variable) else { continue };
        let text = value.to_str().with_context(|| format!("{variable} is no UTF-8"))?;
        let parts: Vec<&str> = text.split(separator).map(str::trim).filter(|part| !part.is_empty()).collect();
        if parts.is_empty() {
            // An empty list of keys would open the server to all.
            bail!("{variable} is set and empty: unset it, or give it a value");
        }
        figment = figment.merge(Serialized::default(name, parts));
    }
    Ok(figment)
}

/// Most threads: beyond, the system refuses or hangs.
const MAX_THREADS: usize = 1024;

fn rayon_threads(threads: usize) -> Result<()> {
    if threads == 0 || threads > MAX_THREADS {
        bail!("--threads {threads}: must be 1 to {MAX_THREADS}");
    }
    engine::ops::cpu::use_threads(threads).context("--threads")
}

/// `512`, `512K`, `512MiB`, ...: binary multiples.
pub fn parse_bytes(text: &str) -> Result<u64> {
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
        let mut flags = ServerFlags::default();
        flags.port = Some(10);
        let settings: Settings = file.merge(Serialized::defaults(&flags)).extract().unwrap();
        assert_eq!((settings.port, settings.host.as_str()), (10, "h"));
        let unknown = Figment::from(Serialized::defaults(Settings::default())).merge(Toml::string("prot = 9"));
        assert!(unknown.extract::<Settings>().unwrap_err().to_string().contains("prot"));
    }
}
