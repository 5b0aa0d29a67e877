//! `pagoda route`: one address in front of many engines, until SIGTERM.

use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use engine::server::{self, ApiKeys, ConnectionLimits};
use prometheus::Registry;
use router::Router;
use router::config::{RouterConfig, TenantOf};
use router::policies::{Preset, Scorer, Weight};
use router::worker::connection::Tcp;
use router::workers_file;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio_rustls::TlsAcceptor;

use crate::flags::LogFormat;
use crate::settings::{check_reach, parse_bytes, read_token};
use crate::{logging, serve};

/// Arguments of `pagoda route`.
#[derive(Args)]
pub struct RouteArgs {
    /// TOML file of the workers; read again when it changes.
    #[arg(long, value_name = "FILE")]
    workers: PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 is any that is free.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Address for operators (metrics, explain); off loopback it wants --cluster-token-file.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    internal_listen: String,
    /// File of the token that the cluster's members share: it opens the engines.
    #[arg(long, value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
    /// How workers are chosen: by predicted time to the first token, held prefixes and a ring (pagoda), as llm-d ships
    /// (queue 2, KV 2, prefix 3), one after the other, by lot, or by the fewest requests.
    #[arg(long, value_parser = presets(), default_value = Preset::Pagoda.name())]
    policy: Preset,
    /// Changes what a scorer counts in the policy; may be given again.
    #[arg(long, value_name = "SCORER=WEIGHT")]
    scorer: Vec<String>,
    /// Key that opens the API; may be given again.
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File of keys, a line each: KEY or NAME KEY. The name is the tenant.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let tenants find each other's prompts in caches.
    #[arg(long)]
    share_prefixes: bool,
    /// Workers that a request is tried on.
    #[arg(long, value_name = "N", default_value_t = 3)]
    max_tries: usize,
    /// Ask a second worker when the first has said nothing for so long. [default: never]
    #[arg(long, value_name = "MS")]
    hedge_after: Option<u64>,
    /// Seconds after which a stream that has begun and says nothing goes on elsewhere.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    stream_timeout: u64,
    /// Chunks of prompts in the index, at most (32 bytes each).
    #[arg(long, value_name = "N", default_value_t = 16 << 20)]
    index_capacity: usize,
    /// Largest request body, with K, M, KiB, MiB.
    #[arg(long, value_name = "BYTES", default_value = "16MiB")]
    max_body_bytes: String,
    /// Answer `x-pagoda-explain: 1` of clients: names and loads of workers are told.
    #[arg(long)]
    explain: bool,
    /// Where traces are sent: OTLP over HTTP, http://HOST:4318/v1/traces. [default: nowhere]
    #[arg(long, value_name = "URL")]
    otlp_traces_endpoint: Option<String>,
    /// Log each request, without its text.
    #[arg(long)]
    access_log: bool,
    /// Certificate chain, PEM: serves HTTPS.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    ssl_certfile: Option<PathBuf>,
    /// Key of the certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,
    /// Seconds that running requests get to finish after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    shutdown_timeout: u64,
    /// How logs are written.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// Reads a preset's name.
fn presets() -> impl TypedValueParser<Value = Preset> {
    PossibleValuesParser::new(Preset::ALL.map(Preset::name)).map(|name| Preset::named(&name).unwrap_or_default())
}

/// Routes until told to stop.
pub fn route(args: RouteArgs) -> Result<ExitCode> {
    let _telemetry = logging::start(args.log_format, false, args.otlp_traces_endpoint.as_deref())?;
    // Follows the workers; requests have threads of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("starting the runtime")?;
    let code = runtime.block_on(run(args));
    // A stream that outlived the shutdown timeout is cut here.
    runtime.shutdown_background();
    code
}

async fn run(args: RouteArgs) -> Result<ExitCode> {
    let address = format!("{}:{}", args.host, args.port);
    let public = TcpListener::bind(&address).await.with_context(|| format!("listening on {address}"))?.into_std()?;
    let internal = TcpListener::bind(&args.internal_listen).await;
    let internal = internal.with_context(|| format!("listening on {} (--internal-listen)", args.internal_listen))?;
    let token = args.cluster_token_file.as_deref().map(read_token).transpose()?;
    check_reach("--internal-listen", internal.local_addr()?, token.is_some())?;
    let tls = serve::tls(args.ssl_certfile.as_deref(), args.ssl_keyfile.as_deref())?;
    let workers = workers_file::read(&args.workers, token.as_deref()).map_err(|error| anyhow!(error))?;
    if workers.is_empty() {
        tracing::warn!(path = %args.workers.display(), "the file names no worker");
    }
    let router = Router::new(config(&args)?, &Registry::new(), Arc::new(Tcp))?;
    router.fleet().set(workers);
    tokio::spawn(follow(Arc::clone(&router), args.workers.clone(), token.clone()));
    tracing::info!(address = %public.local_addr()?, tls = tls.is_some(), "listening");
    tracing::info!(internal = %internal.local_addr()?, "listening for operators");
    let (stop_sender, stop) = watch::channel(false);
    let routes = router::server::routes(Arc::clone(&router));
    let serving = tokio::spawn(serve_on_threads(public, routes, tls, stop.clone())?);
    let routes = router::server::internal_routes(Arc::clone(&router));
    let routes = server::with_cluster_token(routes, token.as_deref());
    let internal_serving = tokio::spawn(server::serve(internal, routes, None, ConnectionLimits::internal(), stop));
    serve::told_to_stop().await;
    tracing::info!(timeout_s = args.shutdown_timeout, "stopping: running streams may finish");
    stop_sender.send_replace(true);
    serve::finish(serving, Duration::from_secs(args.shutdown_timeout)).await?;
    internal_serving.abort();
    Ok(ExitCode::SUCCESS)
}

/// Serves clients on a thread a core, each with the connections that it took and its own to the workers: a request and its
/// answer never wait for another thread. Ends when all have ended.
fn serve_on_threads(
    listener: std::net::TcpListener,
    routes: axum::Router,
    tls: Option<TlsAcceptor>,
    stop: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()>> {
    let count = std::thread::available_parallelism().map_or(1, NonZero::get);
    let limits = ConnectionLimits::default();
    let limits = ConnectionLimits { max_connections: limits.max_connections.div_ceil(count), ..limits };
    let mut ends = Vec::new();
    for number in 0..count {
        let listener = listener.try_clone().context("a thread's listener")?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("a thread's runtime")?;
        let (routes, tls, stop) = (routes.clone(), tls.clone(), stop.clone());
        let (ended, end) = oneshot::channel::<()>();
        let work = move || {
            runtime.block_on(async {
                match TcpListener::from_std(listener) {
                    Ok(listener) => server::serve(listener, routes, tls, limits, stop).await,
                    Err(error) => tracing::error!(%error, "a thread cannot listen"),
                }
            });
            drop(ended);
        };
        std::thread::Builder::new().name(format!("clients-{number}")).spawn(work).context("a thread")?;
        ends.push(end);
    }
    Ok(async move {
        for end in ends {
            // A thread that panicked has ended too.
            drop(end.await);
        }
    })
}

/// Reads the file of workers whenever it has changed.
async fn follow(router: Arc<Router>, path: PathBuf, token: Option<String>) {
    let mut before = workers_file::modified(&path);
    loop {
        before = workers_file::changed(&path, before).await;
        match workers_file::read(&path, token.as_deref()) {
            Ok(workers) => {
                tracing::info!(count = workers.len(), "the file of workers has changed");
                router.fleet().set(workers);
            }
            Err(error) => tracing::error!(error, "the file of workers cannot be used; the workers stay as they are"),
        }
    }
}

fn config(args: &RouteArgs) -> Result<RouterConfig> {
    if args.max_tries == 0 {
        bail!("--max-tries 0: no worker would be asked");
    }
    Ok(RouterConfig {
        weights: weights(args.policy, &args.scorer)?,
        tenant_of: tenant_of(args)?,
        share_prefixes: args.share_prefixes,
        max_tries: args.max_tries,
        stream_timeout: Duration::from_secs(args.stream_timeout.max(1)),
        hedge_after: args.hedge_after.map(Duration::from_millis),
        max_body_bytes: usize::try_from(parse_bytes(&args.max_body_bytes).context("--max-body-bytes")?)?,
        index_capacity: args.index_capacity,
        explain: args.explain,
        traced: args.otlp_traces_endpoint.is_some(),
        access_log: args.access_log,
        ..RouterConfig::default()
    })
}

fn tenant_of(args: &RouteArgs) -> Result<TenantOf> {
    let mut keys = ApiKeys::default();
    for key in &args.api_key {
        keys.add(None, key).map_err(|error| anyhow!(error))?;
    }
    if let Some(path) = &args.api_key_file {
        keys.add_file(path).map_err(|error| anyhow!(error))?;
    }
    Ok(Arc::new(move |headers| if keys.is_empty() { Some("".into()) } else { keys.tenant(headers) }))
}

/// A preset with changes.
fn weights(preset: Preset, changes: &[String]) -> Result<Vec<Weight>> {
    let mut weights = preset.weights();
    for change in changes {
        let known = || Scorer::ALL.map(Scorer::name).join(", ");
        let (name, weight) =
            change.split_once('=').ok_or_else(|| anyhow!("--scorer {change}: should be NAME=WEIGHT"))?;
        let scorer = Scorer::named(name).ok_or_else(|| anyhow!("--scorer {name}: there are {}", known()))?;
        let weight: f64 = weight.parse().with_context(|| format!("--scorer {change}"))?;
        if !(weight.is_finite() && weight >= 0.0) {
            bail!("--scorer {change}: the weight is at least 0");
        }
        weights.retain(|before| before.scorer != scorer);
        if weight > 0.0 {
            weights.push(Weight { scorer, weight });
        }
    }
    if weights.is_empty() {
        bail!("--scorer: no scorer is left");
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scorers_weight_is_changed_added_and_taken() {
        let changed = |changes: &[&str]| {
            let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
            weights(Preset::LlmDDefault, &changes)
        };
        let of =
            |weights: &[Weight]| weights.iter().map(|weight| (weight.scorer.name(), weight.weight)).collect::<Vec<_>>();
        let weights = changed(&["queue=0", "kv-headroom=1.5", "random=0.1"]).unwrap();
        assert_eq!(of(&weights), [("prefix-cache", 3.0), ("kv-headroom", 1.5), ("random", 0.1)]);
        for (wrong, words) in [
            ("queue", "NAME=WEIGHT"),
            ("cue=1", "there are prefix-cache"),
            ("queue=-1", "at least 0"),
            ("queue=x", "--scorer queue=x"),
        ] {
            let error = format!("{:#}", changed(&[wrong]).unwrap_err());
            assert!(error.contains(words), "{wrong}: {error}");
        }
        assert!(changed(&["queue=0", "kv-headroom=0", "prefix-cache=0"]).is_err());
    }
}
