//! Connections to one worker: made when needed, used again, over any transport.
//!
//! Used by dispatch and by whoever follows or probes a worker. A connection comes back when its answer has been read to the
//! end; dropping an answer that has not closes it, which cancels the request there.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Connections that are kept while nobody uses them.
const MAX_IDLE: usize = 256;
/// So long one is kept: shorter than servers keep theirs.
const MAX_IDLE_TIME: Duration = Duration::from_secs(20);

/// A host that does not answer by then is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection's two directions.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Makes connections: TCP, or in tests pipes.
pub trait Connector: Send + Sync + 'static {
    /// A connection to `HOST:PORT`.
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Io>>>;
}

/// Plain TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Connector for Tcp {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Io>>> {
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            // Tokens are small and wanted at once.
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}

/// Why a request could not be sent, or its answer's head did not come.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// No connection.
    #[error("cannot connect to {address}: {error}")]
    Connect {
        /// Of the worker.
        address: String,
        /// Why.
        error: io::Error,
    },
    /// It broke.
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
}

type Sender = SendRequest<Full<Bytes>>;

/// The connections to one worker.
pub struct Upstream {
    address: String,
    connector: Arc<dyn Connector>,
    idle: Arc<Idle>,
}

/// Connections that nobody uses, by the thread that does: an answer that comes to another thread must wake this one.
#[derive(Default)]
struct Idle([Mutex<Vec<(Sender, Instant)>>; NUM_THREADS]);

/// Threads that are told apart.
const NUM_THREADS: usize = 16;

thread_local! {
    static THREAD: usize = NEXT_THREAD.fetch_add(1, Ordering::Relaxed) % NUM_THREADS;
}
static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

impl Idle {
    fn of_this_thread(&self) -> MutexGuard<'_, Vec<(Sender, Instant)>> {
        lock(&self.0[THREAD.with(|thread| *thread)])
    }
}

/// An answer and the connection that it comes by.
pub struct Answer {
    /// Head and body.
    pub response: Response<Incoming>,
    connection: Kept,
}

/// A connection in use.
pub struct Kept {
    sender: Option<Sender>,
    idle: Arc<Idle>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Answer {
    /// Head and body, and what is to be told when the body has been read to its end.
    pub fn into_parts(self) -> (Response<Incoming>, Kept) {
        (self.response, self.connection)
    }
}

impl Kept {
    /// The answer has been read to its end: the connection is free.
    pub fn give_back(mut self) {
        if let Some(sender) = self.sender.take() {
            let mut idle = self.idle.of_this_thread();
            if idle.len() < MAX_IDLE && !sender.is_closed() {
                idle.push((sender, Instant::now()));
            }
        }
    }
}

impl Upstream {
    /// Connections to `HOST:PORT`.
    pub fn new(address: String, connector: Arc<dyn Connector>) -> Self {
        Self { address, connector, idle: Arc::default() }
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request and waits for the head of its answer, on a kept connection where there is one.
    ///
    /// # Errors
    /// When there is no connection, or it breaks before the head.
    pub async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Answer, UpstreamError> {
        while let Some(mut sender) = self.kept() {
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(self.answer(sender, response)),
                // It was closed at the other end: what was not sent is sent on another.
                Err(mut error) => match error.take_message() {
                    Some(message) => request = message,
                    None => return Err(error.into_error().into()),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request).await?;
        Ok(self.answer(sender, response))
    }

    fn answer(&self, sender: Sender, response: Response<Incoming>) -> Answer {
        Answer { response, connection: Kept { sender: Some(sender), idle: Arc::clone(&self.idle) } }
    }

    async fn connect(&self) -> Result<Sender, UpstreamError> {
        let failed = |error| UpstreamError::Connect { address: self.address.clone(), error };
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.connector.connect(&self.address)).await;
        let io = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(failed)?;
        let (sender, connection) = Builder::new().handshake(TokioIo::new(io)).await?;
        // It ends with the sender, or with the other side; the request hears of an error.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    /// A kept connection whose last answer is over.
    fn kept(&self) -> Option<Sender> {
        let mut idle = self.idle.of_this_thread();
        while let Some(at) = idle.iter().rposition(|(sender, _)| sender.is_ready() || sender.is_closed()) {
            let (sender, since) = idle.swap_remove(at);
            if !sender.is_closed() && since.elapsed() < MAX_IDLE_TIME {
                return Some(sender);
            }
        }
        None
    }

    /// Closes what is kept: the worker is gone, and so are its connections.
    pub fn forget(&self) {
        self.idle.0.iter().for_each(|idle| lock(idle).clear());
    }
}
