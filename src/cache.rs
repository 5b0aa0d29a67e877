//! `pagoda cache`: KV blocks on a disk for many engines, and the care of a directory of them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use cache_tier::disk::{Compacted, Verified};
use cache_tier::http::KvService;
use cache_tier::metrics::PlaceMetrics;
use cache_tier::remote::RemoteStore;
use cache_tier::{DiskConfig, DiskStore, PlaceStats, Store};
use clap::{Args, Subcommand};
use engine::server::{self, ConnectionLimits};
use indicatif::BinaryBytes;
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::flags::LogFormat;
use crate::settings::{check_reach, parse_bytes, read_token};
use crate::{logging, serve, tiers};

/// Arguments of `pagoda cache`.
#[derive(Args)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// Keep KV blocks for many engines, which name this service with --kv-tier.
    Serve(ServeArgs),
    /// Tell what a directory or a service holds.
    Stats(Target),
    /// Read every block and drop those that are damaged.
    Verify(Target),
    /// Give back the room of segments that are nearly empty.
    Compact(Target),
}

/// What the service is started with.
#[derive(Args)]
struct ServeArgs {
    /// Directory of the blocks; made where there is none.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Most bytes of its files, with K, M, G or KiB, MiB, GiB.
    #[arg(long, value_name = "BYTES", default_value = "10GiB")]
    capacity: String,
    /// Address to listen on; off loopback it wants --cluster-token-file.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8100")]
    listen: String,
    /// File of the token that the cluster's members share.
    #[arg(long, value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
    /// Certificate chain, PEM: serves HTTPS.
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    ssl_certfile: Option<PathBuf>,
    /// Key of the certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    ssl_keyfile: Option<PathBuf>,
    /// Seconds that running requests get to finish after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    shutdown_timeout: u64,
    /// How logs are written.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

/// A directory that no process has, or a running service.
#[derive(Args)]
struct Target {
    /// A directory that no process has open, or the URL of a running service.
    #[arg(value_name = "DIR|URL")]
    target: String,
    /// File of the cluster's token, for a URL.
    #[arg(long, value_name = "FILE")]
    cluster_token_file: Option<PathBuf>,
    /// Certificates that are trusted, for an https URL.
    #[arg(long, value_name = "FILE")]
    cafile: Option<PathBuf>,
}

/// Runs a subcommand.
pub fn cache(args: CacheArgs) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    match args.command {
        CacheCommand::Serve(args) => {
            let _telemetry = logging::start(args.log_format, false, None)?;
            runtime.block_on(serve(args))
        }
        CacheCommand::Stats(target) => runtime.block_on(stats(target)),
        CacheCommand::Verify(target) => runtime.block_on(verify(target)),
        CacheCommand::Compact(target) => runtime.block_on(compact(target)),
    }
}

/// What `/metrics` reads.
struct Metrics {
    registry: Registry,
    places: PlaceMetrics,
    disk: Arc<DiskStore>,
}

async fn serve(args: ServeArgs) -> Result<ExitCode> {
    let capacity_bytes = parse_bytes(&args.capacity).context("--capacity")?;
    let listener = TcpListener::bind(&args.listen).await.with_context(|| format!("listening on {}", args.listen))?;
    let address = listener.local_addr()?;
    let token = args.cluster_token_file.as_deref().map(read_token).transpose()?;
    check_reach("--listen", address, token.is_some())?;
    let tls = serve::tls(args.ssl_certfile.as_deref(), args.ssl_keyfile.as_deref())?;
    let disk = Arc::new(DiskStore::open(DiskConfig { directory: args.dir, capacity_bytes })?);
    let registry = Registry::new();
    let metrics = Metrics { places: PlaceMetrics::new(&registry)?, registry, disk: Arc::clone(&disk) };
    let open = Router::new().route("/health", get(|| async { "ok" })).route("/ready", get(|| async { "ready" }));
    let open = open.route("/metrics", get(render)).with_state(Arc::new(metrics));
    let kv = KvService::of_disk(Arc::clone(&disk));
    let router = server::with_cluster_token(kv.clone().router(), token.as_deref()).merge(open);
    tracing::info!(%address, tls = tls.is_some(), capacity = capacity_bytes, "keeping KV blocks");
    let (stop_sender, stop) = watch::channel(false);
    let serving = tokio::spawn(server::serve(listener, router, tls, ConnectionLimits::internal(), stop));
    serve::told_to_stop().await;
    tracing::info!("stopping: running requests may finish");
    stop_sender.send_replace(true);
    let limit = Duration::from_secs(args.shutdown_timeout);
    serve::finish(serving, limit).await?;
    if tokio::time::timeout(limit, kv.end()).await.is_err() {
        tracing::warn!("connections that still send blocks are cut");
    }
    disk.sync().await;
    Ok(ExitCode::SUCCESS)
}

async fn render(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    metrics.places.refresh(&metrics.disk.stats());
    let text = TextEncoder::new().encode_to_string(&metrics.registry.gather()).unwrap_or_default();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

/// What a subcommand works on.
enum Opened {
    Directory(DiskStore),
    Service(Box<RemoteStore>),
}

impl Target {
    fn open(&self) -> Result<Opened> {
        if self.target.contains("://") {
            let token = self.cluster_token_file.as_deref().map(read_token).transpose()?;
            let service = tiers::remote(&self.target, self.cafile.as_deref(), token.as_deref())?;
            return Ok(Opened::Service(Box::new(service)));
        }
        let directory = Path::new(&self.target);
        if !directory.is_dir() {
            bail!("{} is no directory, and no URL such as http://HOST:PORT", self.target);
        }
        if !DiskStore::is_at(directory) {
            bail!("{} holds no KV blocks", self.target);
        }
        // Looked at, not cut: whatever the cap was, all of it stays.
        let config = DiskConfig { directory: directory.to_owned(), capacity_bytes: u64::MAX };
        Ok(Opened::Directory(DiskStore::open(config)?))
    }
}

async fn ask<T: serde::de::DeserializeOwned>(service: &RemoteStore, path: &str) -> Result<T> {
    service.care(path).await.with_context(|| service.address().to_owned())
}

async fn stats(target: Target) -> Result<ExitCode> {
    let opened = target.open()?;
    let is_directory = matches!(opened, Opened::Directory(_));
    let all: Vec<PlaceStats> = match opened {
        Opened::Directory(disk) => {
            println!("index      {} of memory", BinaryBytes(disk.index_bytes() as u64));
            disk.stats()
        }
        Opened::Service(service) => ask(&service, "/kv/v1/stats").await?,
    };
    for stats in all {
        println!("tier       {}", stats.place.as_str());
        println!("blocks     {}", stats.num_blocks);
        println!("bytes      {}", BinaryBytes(stats.used_bytes));
        if stats.capacity_bytes < u64::MAX {
            println!("capacity   {}", BinaryBytes(stats.capacity_bytes));
        }
        // Nothing has been asked of a directory that was just opened.
        if is_directory {
            continue;
        }
        let PlaceStats { hits, misses, busy, damaged, stored, not_admitted, refused, evicted, .. } = stats;
        println!("lookups    {hits} hits, {misses} misses, {busy} busy, {damaged} damaged");
        println!("puts       {stored} stored, {not_admitted} seen once, {refused} refused; {evicted} evicted");
    }
    Ok(ExitCode::SUCCESS)
}

async fn verify(target: Target) -> Result<ExitCode> {
    let report: Verified = match target.open()? {
        Opened::Directory(disk) => disk.verify(),
        Opened::Service(service) => ask(&service, "/kv/v1/verify").await?,
    };
    report.problems.iter().for_each(|problem| println!("{problem}"));
    let Verified { segments, whole, bytes, damaged, .. } = report;
    println!(
        "{whole} blocks ({}) in {segments} segments are whole, {damaged} were damaged and are dropped",
        BinaryBytes(bytes)
    );
    Ok(if damaged == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn compact(target: Target) -> Result<ExitCode> {
    let Compacted { moved, deleted, freed_bytes } = match target.open()? {
        Opened::Directory(disk) => disk.compact().await,
        Opened::Service(service) => ask(&service, "/kv/v1/compact").await?,
    };
    println!("{moved} blocks moved, {deleted} segments deleted, {} given back", BinaryBytes(freed_bytes));
    Ok(ExitCode::SUCCESS)
}
