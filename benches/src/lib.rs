//! What the tools of the benchmark share: loopback TLS from PEM files, and the wall clock.

use std::{
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use tokio::runtime::Builder;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Accepts TLS with the certificate in these PEM files, HTTP/1.1 and HTTP/2.
pub fn acceptor(certificate: &Path, private_key: &Path) -> TlsAcceptor {
    let chain = CertificateDer::pem_file_iter(certificate).expect("the certificate can be read");
    let chain = chain.collect::<Result<_, _>>().expect("the certificate is PEM");
    let private_key = PrivateKeyDer::from_pem_file(private_key).expect("the private key is PEM");
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3");
    let mut config = config
        .with_no_client_auth()
        .with_single_cert(chain, private_key)
        .expect("the certificate and the key belong together");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// Speaks TLS, HTTP/1.1, with whoever listens: the benchmark's certificates are thrown away after it, and it talks to
/// loopback only.
pub fn connector() -> TlsConnector {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3");
    let trust = Arc::new(TrustAnybody(provider));
    let mut config = config.dangerous().with_custom_certificate_verifier(trust).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsConnector::from(Arc::new(config))
}

/// Runs this on a work-stealing runtime of so many threads.
pub fn run(threads: usize, serving: impl Future<Output = ()>) {
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    runtime.expect("a runtime starts").block_on(serving);
}

/// Nanoseconds since 1970. The upstream writes them into its events and the load client, on the same machine, subtracts
/// them.
pub fn wall_clock_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    since.as_nanos() as u64
}

#[derive(Debug)]
struct TrustAnybody(Arc<CryptoProvider>);

impl ServerCertVerifier for TrustAnybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
