//! Connections to a remote tier: made when needed, used again, and over any transport.
//!
//! Used by `RemoteStore` alone. A connection is free again once its answer has been read to the end; one whose answer was
//! given up is closed.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderValue, UPGRADE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use protocol::{Buffers, kv_wire};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::stream::BlockStream;
use super::{RemoteError, refusal};

/// Connections that are kept while nobody uses them.
const MAX_IDLE: usize = 8;

/// So long a connection for blocks is kept: half of what its other end allows.
const MAX_IDLE_TIME: Duration = Duration::from_secs(30);

/// A connection's two directions.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Makes connections.
pub trait Connector: Send + Sync {
    /// Host and port, as in the `Host` header and in logs.
    fn address(&self) -> &str;

    /// A new connection.
    fn connect(&self) -> BoxFuture<'_, std::io::Result<Box<dyn Io>>>;
}

/// Where a tier is: `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteUrl {
    /// Host and port.
    pub address: String,
    /// Whether it speaks TLS.
    pub tls: bool,
}

impl RemoteUrl {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| format!("`{url}`: should be like http://HOST:PORT"))?;
        let tls = match scheme {
            "http" => false,
            "https" => true,
            _ => return Err(format!("`{url}`: the scheme is http or https, not {scheme}")),
        };
        let address = rest.trim_end_matches('/');
        if address.is_empty() || address.contains(['/', '?', '#', '@']) {
            return Err(format!("`{url}`: should be like {scheme}://HOST:PORT, without a path"));
        }
        let has_port =
            address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        let address = if has_port { address.to_owned() } else { format!("{address}:{}", if tls { 443 } else { 80 }) };
        Ok(Self { address, tls })
    }
}

/// Plain TCP.
pub struct TcpConnector(
    /// Host and port.
    pub String,
);

impl Connector for TcpConnector {
    fn address(&self) -> &str {
        &self.0
    }

    fn connect(&self) -> BoxFuture<'_, std::io::Result<Box<dyn Io>>> {
        Box::pin(async {
            let stream = TcpStream::connect(&self.0).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}

/// TLS over TCP.
pub struct TlsConnector {
    tcp: TcpConnector,
    name: ServerName<'static>,
    connector: tokio_rustls::TlsConnector,
}

impl TlsConnector {
    /// Trusts the certificates of a PEM file.
    ///
    /// # Errors
    /// When the file cannot be read or the host has no valid name.
    pub fn new(address: &str, authorities: &Path) -> Result<Self, String> {
        let fail = |reason: String| format!("{}: {reason}", authorities.display());
        let mut roots = rustls::RootCertStore::empty();
        let certificates = CertificateDer::pem_file_iter(authorities).map_err(|error| fail(error.to_string()))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| fail(error.to_string()))?;
            roots.add(certificate).map_err(|error| fail(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(fail("holds no certificate".into()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let name = ServerName::try_from(host.to_owned()).map_err(|error| format!("{host}: {error}"))?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        Ok(Self { tcp: TcpConnector(address.to_owned()), name, connector })
    }
}

impl Connector for TlsConnector {
    fn address(&self) -> &str {
        self.tcp.address()
    }

    fn connect(&self) -> BoxFuture<'_, std::io::Result<Box<dyn Io>>> {
        Box::pin(async {
            let stream = self.tcp.connect().await?;
            let stream = self.connector.connect(self.name.clone(), stream).await?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}

/// A body whose parts are sent as they are, without being joined.
#[derive(Debug)]
pub(super) struct Parts(std::vec::IntoIter<Bytes>);

impl Body for Parts {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.next().map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.len() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_slice().iter().map(|part| part.len() as u64).sum())
    }
}

/// The connections of one client.
pub(super) struct Connections {
    connector: Arc<dyn Connector>,
    token: Option<HeaderValue>,
    idle: Mutex<Vec<SendRequest<Parts>>>,
    idle_streams: Mutex<Vec<(BlockStream, Instant)>>,
}

impl Connections {
    pub(super) fn new(connector: Arc<dyn Connector>, token: Option<&str>) -> Self {
        let bearer = |token| HeaderValue::try_from(format!("Bearer {token}")).ok();
        let token = token.and_then(bearer).map(|mut token| {
            token.set_sensitive(true);
            token
        });
        Self { connector, token, idle: Mutex::default(), idle_streams: Mutex::default() }
    }

    pub(super) fn address(&self) -> &str {
        self.connector.address()
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn post(&self, path: &str, body: Vec<Bytes>) -> Result<Response<Incoming>, RemoteError> {
        let failed = |error: hyper::Error| RemoteError::Connection(error.to_string());
        // A kept connection may have been closed at the other end: what was not sent is sent on a new one.
        if let Some(mut kept) = self.kept() {
            match kept.try_send_request(self.request(path, body.clone())?).await {
                Ok(response) => {
                    self.keep(kept);
                    return Ok(response);
                }
                Err(mut error) => {
                    if error.take_message().is_none() {
                        return Err(failed(error.into_error()));
                    }
                }
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(self.request(path, body)?).await.map_err(failed)?;
        self.keep(sender);
        Ok(response)
    }

    async fn connect(&self) -> Result<SendRequest<Parts>, RemoteError> {
        let io = self.connector.connect().await.map_err(|error| RemoteError::Connection(error.to_string()))?;
        let shaken = handshake(TokioIo::new(io)).await;
        let (sender, connection) = shaken.map_err(|error| RemoteError::Connection(error.to_string()))?;
        // It ends with the sender, or with the other side; the request hears of an error.
        tokio::spawn(async move { drop(connection.with_upgrades().await) });
        Ok(sender)
    }

    /// A new connection on which blocks are asked for.
    pub(super) async fn stream(&self, buffers: Arc<Buffers>) -> Result<BlockStream, RemoteError> {
        let failed = |error: hyper::Error| RemoteError::Connection(error.to_string());
        let mut request = self.request("/kv/v1/get", Vec::new())?;
        *request.method_mut() = Method::GET;
        request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(UPGRADE, HeaderValue::from_static(kv_wire::STREAM_PROTOCOL));
        let response = self.connect().await?.send_request(request).await.map_err(failed)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refusal(response).await);
        }
        Ok(BlockStream::new(hyper::upgrade::on(response).await.map_err(failed)?, buffers))
    }

    /// The connection that was used last; those that its other end is about to close are dropped.
    pub(super) fn kept_stream(&self) -> Option<BlockStream> {
        let mut idle = self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|(_, since)| since.elapsed() < MAX_IDLE_TIME);
        idle.pop().map(|(stream, _)| stream)
    }

    /// Drops all that are kept.
    pub(super) fn forget_streams(&self) {
        self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Keeps a connection whose answers have all been taken.
    pub(super) fn keep_stream(&self, stream: BlockStream) {
        let mut idle = self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE && stream.is_at_rest() {
            idle.push((stream, Instant::now()));
        }
    }

    /// A kept connection whose last answer has been read.
    fn kept(&self) -> Option<SendRequest<Parts>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|sender| !sender.is_closed());
        let ready = idle.iter().position(SendRequest::is_ready)?;
        Some(idle.swap_remove(ready))
    }

    fn keep(&self, sender: SendRequest<Parts>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(sender);
        }
    }

    fn request(&self, path: &str, body: Vec<Bytes>) -> Result<Request<Parts>, RemoteError> {
        let mut request = Request::post(path)
            .header(HOST, self.connector.address())
            .header(CONTENT_TYPE, HeaderValue::from_static(kv_wire::CONTENT_TYPE));
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        request.body(Parts(body.into_iter())).map_err(|error| RemoteError::Connection(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_host_and_a_port() {
        let parsed = |url: &str| RemoteUrl::parse(url).map(|url| (url.address, url.tls));
        assert_eq!(parsed("http://tier:9000/"), Ok(("tier:9000".into(), false)));
        assert_eq!(parsed("https://tier"), Ok(("tier:443".into(), true)));
        assert_eq!(parsed("http://[::1]:7"), Ok(("[::1]:7".into(), false)));
        for wrong in ["tier:9000", "ftp://tier", "http://", "http://tier/kv", "http://a@b"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
