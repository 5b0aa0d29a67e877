//! `pagoda serve`: the OpenAI API over HTTP, until SIGTERM or the device fails.

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use engine::engine_loop::{EngineHandle, EngineState};
use engine::server::{self, ConnectionLimits, Server};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::flags::{EngineFlags, ServerFlags};
use crate::model::{self, StartedModel};
use crate::settings::Settings;
use crate::{EXIT_DEVICE_FAILED, logging, tiers};

/// Arguments of `pagoda serve`.
#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    server: ServerFlags,
}

/// Error events of running streams get this long to reach their clients after the device failed.
const FAILURE_GRACE: Duration = Duration::from_secs(1);
/// What the cluster asked last gets its answer; streams of events do not end by themselves.
const INTERNAL_GRACE: Duration = Duration::from_millis(500);

/// Serves until told to stop.
pub fn serve(args: ServeArgs) -> Result<ExitCode> {
    let settings = Settings::load(&args.engine, &args.server)?;
    let _telemetry = logging::start(settings.log_format, false, settings.otlp_traces_endpoint.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let code = runtime.block_on(run(&settings));
    // A stream that outlived the shutdown timeout is cut here.
    runtime.shutdown_background();
    code
}

/// The two doors: clients come by one, the cluster by the other.
struct Listeners {
    public: TcpListener,
    internal: TcpListener,
    cluster_token: Option<String>,
    tls: Option<TlsAcceptor>,
}

async fn listen(settings: &Settings) -> Result<Listeners> {
    let address = format!("{}:{}", settings.host, settings.port);
    let public = TcpListener::bind(&address).await.with_context(|| format!("listening on {address}"))?;
    let address = settings.internal_address();
    let internal = match TcpListener::bind(&address).await {
        Err(error) if error.kind() == ErrorKind::AddrInUse && !settings.names_internal_address() => {
            TcpListener::bind("127.0.0.1:0").await
        }
        bound => bound,
    }
    .with_context(|| format!("listening on {address} for the cluster (--internal-listen)"))?;
    let cluster_token = settings.cluster_token(internal.local_addr()?)?;
    let tls = tls(settings.ssl_certfile.as_deref(), settings.ssl_keyfile.as_deref())?;
    Ok(Listeners { public, internal, cluster_token, tls })
}

/// What turns connections into HTTPS, where a certificate is given.
pub fn tls(certificates: Option<&Path>, key: Option<&Path>) -> Result<Option<TlsAcceptor>> {
    match (certificates, key) {
        (Some(certificates), Some(key)) => {
            Ok(Some(server::acceptor(certificates, key).map_err(|error| anyhow!(error))?))
        }
        (None, None) => Ok(None),
        _ => bail!("--ssl-certfile and --ssl-keyfile are given together or not at all"),
    }
}

/// Lets a stopped server's requests finish, and cuts those that take longer.
pub async fn finish(mut serving: JoinHandle<()>, grace: Duration) -> Result<()> {
    match tokio::time::timeout(grace, &mut serving).await {
        Ok(served) => served.context("the server's task"),
        Err(_) => {
            tracing::warn!(grace_s = grace.as_secs(), "requests were still running and are cut");
            serving.abort();
            // It ends by being aborted, with its connections.
            drop(serving.await);
            Ok(())
        }
    }
}

async fn run(settings: &Settings) -> Result<ExitCode> {
    let Listeners { public, internal, cluster_token, tls } = listen(settings).await?;
    let StartedModel { engine, tokenizer, chat_template, names } =
        model::start(settings, Some(tiers::open(settings)?))?;
    let server = Server::new(engine.clone(), tokenizer, chat_template, settings.server(names)?);
    let router = server::router(Arc::clone(&server)).map_err(|error| anyhow!(error)).context("--allowed-origins")?;
    let internal_router = server::internal_router(Arc::clone(&server), cluster_token.as_deref());
    tracing::info!(address = %public.local_addr()?, tls = tls.is_some(), "listening");
    tracing::info!(internal = %internal.local_addr()?, "listening for the cluster");
    let (stop_sender, stop) = watch::channel(false);
    let limits = ConnectionLimits::default();
    let serving = tokio::spawn(server::serve(public, router, tls, limits, stop.clone()));
    // The cluster is told that this engine drains until it is gone.
    let (internal_stop, internal_stopped) = watch::channel(false);
    let internal_limits = ConnectionLimits::internal();
    let mut internal_serving =
        tokio::spawn(server::serve(internal, internal_router, None, internal_limits, internal_stopped));
    let code = tokio::select! {
        code = engine_ended(engine.clone()) => code?,
        () = told_to_stop() => {
            tracing::info!(timeout_s = settings.shutdown_timeout, "stopping: running streams may finish");
            ExitCode::SUCCESS
        }
        () = server.drain_asked() => {
            tracing::info!(timeout_s = settings.shutdown_timeout, "asked to drain: running streams may finish");
            ExitCode::SUCCESS
        }
    };
    server.drain();
    stop_sender.send_replace(true);
    let grace = if code == ExitCode::SUCCESS { Duration::from_secs(settings.shutdown_timeout) } else { FAILURE_GRACE };
    // Cut streams give their blocks back, so that those can be put down.
    let (finished, all_done) = tokio::join!(finish(serving, grace), finish_inside(&engine, grace));
    finished?;
    if !all_done {
        // They would keep the blocks from being put down.
        internal_serving.abort();
    }
    if code == ExitCode::SUCCESS {
        drain_blocks(&engine, settings).await;
    }
    internal_stop.send_replace(true);
    drop(tokio::time::timeout(INTERNAL_GRACE, &mut internal_serving).await);
    internal_serving.abort();
    Ok(code)
}

/// Lets the requests finish that routers brought, whose streams are continued elsewhere and whose whole answers are not;
/// whether all did.
async fn finish_inside(engine: &EngineHandle, grace: Duration) -> bool {
    let all_done = async {
        while engine.num_in_engine() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let done = tokio::time::timeout(grace, all_done).await.is_ok();
    if !done {
        tracing::warn!(grace_s = grace.as_secs(), "requests were still running and are cut");
    }
    done
}

/// Puts the engine's KV blocks where a replacement finds them.
async fn drain_blocks(engine: &EngineHandle, settings: &Settings) {
    if !engine.kv_store().outlives() {
        return;
    }
    let limit = Duration::from_secs(settings.kv_drain_timeout);
    let started = Instant::now();
    match tokio::time::timeout(limit, engine.drain_blocks()).await {
        Ok(()) => tracing::debug!(seconds = started.elapsed().as_secs_f64(), "the drain is over"),
        Err(_) => tracing::warn!(limit_s = limit.as_secs(), "not all KV blocks were drained in time"),
    }
}

/// Waits for the engine to fail, reporting when it is ready on the way.
async fn engine_ended(engine: EngineHandle) -> Result<ExitCode> {
    let mut state = engine.watch();
    drop(engine);
    loop {
        let current = state.borrow_and_update().clone();
        match current {
            EngineState::Loading(..) => {}
            EngineState::Ready(device) => tracing::info!(device, "ready"),
            EngineState::LoadFailed(reason) => return Err(anyhow!(reason)),
            EngineState::Failed(reason) => {
                tracing::error!(reason, "the engine failed");
                return Ok(ExitCode::from(EXIT_DEVICE_FAILED));
            }
        }
        if state.changed().await.is_err() {
            tracing::error!("the engine thread has ended");
            return Ok(ExitCode::from(EXIT_DEVICE_FAILED));
        }
    }
}

/// Waits for SIGTERM or an interrupt.
#[cfg(unix)]
pub async fn told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Waits for an interrupt.
#[cfg(not(unix))]
pub async fn told_to_stop() {
    drop(tokio::signal::ctrl_c().await);
}
