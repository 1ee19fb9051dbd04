//! TLS on both sides: the certificate that clients see, and the roots that upstreams are judged by.
//!
//! Nothing else touches rustls, but for the connector that dials upstreams. Where no certificate is configured or there,
//! a development certificate is made, so that the first start needs no preparation.

mod client;
mod development;

use std::{
    fmt, fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use rustls::{
    InconsistentKeys, ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{ServerSessionMemoryCache, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
    version::{TLS12, TLS13},
};
use x509_parser::{
    extensions::GeneralName,
    nom,
    prelude::{FromDer, X509Certificate, X509Error},
    time::ASN1Time,
};

pub use self::client::{store_config, upstream_config};
use crate::config;

/// Sessions that can be resumed without a full handshake. SDKs open new connections all the time.
const RESUMABLE_SESSIONS: usize = 10_240;

/// What the log says of the certificate that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The host names and addresses that it is good for.
    pub names: Vec<String>,
    /// The last second of its life.
    pub not_after: Timestamp,
    /// Made by Tollgate, now or at an earlier start: no client trusts it that was not told to.
    pub development: bool,
}

impl Certificate {
    /// How long it lives from `now` on; zero once it has expired.
    pub fn expires_in(&self, now: Timestamp) -> Duration {
        Duration::try_from(self.not_after.duration_since(now)).unwrap_or(Duration::ZERO)
    }
}

/// TLS can't be set up. Each message says what to do; what the system or a library said is the source.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// One file of the pair is there and the other is not.
    #[error(
        "{} is there but {} is not: both must be there, or neither for a development certificate to be made",
        .there.display(), .missing.display()
    )]
    HalfMissing {
        /// The one that is there.
        there: PathBuf,
        /// The one that is not.
        missing: PathBuf,
    },
    /// A file is there and can't be read.
    #[error("can't read {}: check that the user that runs tollgate may read it", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is damaged PEM.
    #[error("{} is damaged: it must be PEM, text between BEGIN and END lines", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        source: pem::Error,
    },
    /// A file holds nothing of what it is for.
    #[error("there is no {expected} in {}: it must be PEM with a `-----BEGIN …` line{hint}", .path.display())]
    Absent {
        /// The file.
        path: PathBuf,
        /// What it is for.
        expected: Section,
        /// What it seems to hold instead.
        hint: Hint,
    },
    /// The certificate can't be parsed.
    #[error("the first certificate in {} can't be parsed: make or copy it again", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: nom::Err<X509Error>,
    },
    /// The certificate's life is over.
    #[error("the certificate in {} expired at {at}: renew it{}", .path.display(), if *.development {
        ", or remove it and its key for a new development certificate to be made"
    } else {
        ""
    })]
    Expired {
        /// The file.
        path: PathBuf,
        /// When.
        at: Timestamp,
        /// Whether Tollgate made it.
        development: bool,
    },
    /// The certificate's life has not begun.
    #[error("the certificate in {} is not valid before {from}: check this machine's clock, or renew it", .path.display())]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// When it begins.
        from: Timestamp,
    },
    /// The key is not the certificate's.
    #[error(
        "the key in {} does not belong to the first certificate in {}: give the key that the certificate was made \
         with, and put the server's own certificate before those that signed it",
        .private_key.display(), .certificate.display()
    )]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        private_key: PathBuf,
    },
    /// rustls refuses the certificate or the key.
    #[error("can't speak TLS with the key in {}: use an ECDSA, Ed25519 or RSA key of 2048 bits or more", .path.display())]
    Unsuitable {
        /// The key's file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// A certificate to trust can't be used as one.
    #[error("a certificate in {} can't be trusted as a root: remove it, or make it again as X.509 version 3", .path.display())]
    BadRoot {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// An upstream's certificates can't be used.
    #[error("upstream `{name}`: {source}")]
    Upstream {
        /// The upstream.
        name: Arc<str>,
        /// Why.
        source: Box<Self>,
    },
    /// No certificate can be for this name.
    #[error(
        "`{name}` is no name that a certificate can be for: write another host into the URL, or a `server_name`"
    )]
    ServerName {
        /// The name.
        name: String,
    },
    /// The system trusts no certificate at all.
    #[error(
        "this system has no root certificates to judge upstreams by: install its `ca-certificates` package, or name a \
         PEM file in the upstream's `ca_file` or in SSL_CERT_FILE"
    )]
    NoRoots {
        /// The first of the errors that were met.
        source: Option<rustls_native_certs::Error>,
    },
    /// The development certificate can't be made.
    #[error("can't make a development certificate for {}", .path.display())]
    Make {
        /// Where it would have been.
        path: PathBuf,
        /// Why.
        source: rcgen::Error,
    },
    /// The development certificate can't be kept.
    #[error(
        "can't write a development certificate into {}: make the folder writable for the user that runs tollgate, or \
         put a certificate and its key there", .folder.display()
    )]
    Write {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What a PEM file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Certificates.
    Certificate,
    /// A private key.
    Key,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "certificate",
            Self::Key => "private key",
        })
    }
}

/// What a PEM file seems to hold in place of what was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing that is known.
    Nothing,
    /// The other file's contents.
    Swapped,
    /// A key behind a passphrase.
    Encrypted,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "",
            Self::Swapped => " (are the certificate's and the key's file swapped?)",
            Self::Encrypted => " (the key is encrypted: write it out in the clear with `openssl pkey`)",
        })
    }
}

/// What the listeners serve, and what the log says of it. Where neither file exists, a development certificate is made first.
///
/// Files are read, and perhaps written: call this before serving, and again to take up renewed files.
pub fn server_config(tls: &config::Tls) -> Result<(Arc<ServerConfig>, Certificate), TlsError> {
    let now = Timestamp::now();
    let there = is_there(tls).or_else(|_| {
        // Another process may be between its two files.
        let _lock = development::lock(tls);
        is_there(tls)
    })?;
    if !there {
        development::make(tls)?;
    }
    let chain = certificates_in(&tls.certificate)?;
    let key = key_in(&tls.private_key)?;
    let certificate = describe(&chain[0], &tls.certificate, now)?;

    let provider = provider();
    let certified = CertifiedKey::from_der(chain, key, &provider)
        .map_err(|source| unusable(&tls.certificate, &tls.private_key, source))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13, &TLS12])
        .expect("aws-lc-rs has cipher suites for both versions");
    let builder = match &tls.client_ca_file {
        Some(path) => builder.with_client_cert_verifier(clients_of(path, provider)?),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![b"h2".into(), b"http/1.1".into()];
    config.session_storage = ServerSessionMemoryCache::new(RESUMABLE_SESSIONS);
    // Early data could be replayed, and a replayed request costs money.
    config.max_early_data_size = 0;
    Ok((Arc::new(config), certificate))
}

/// Lets nobody in who shows no certificate of these authorities.
fn clients_of(path: &Path, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let roots = Arc::new(client::roots_in(path)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
    Ok(verifier.expect("there is a root, and no revocation list that could be wrong"))
}

fn unusable(certificate: &Path, private_key: &Path, source: rustls::Error) -> TlsError {
    match source {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            TlsError::Mismatch { certificate: certificate.into(), private_key: private_key.into() }
        }
        source => TlsError::Unsuitable { path: private_key.into(), source },
    }
}

/// Given to every configuration by name, so that no default of the process can be missing or another.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Whether the pair is there. A symbolic link to nowhere is there, for somebody meant a file by it.
fn is_there(tls: &config::Tls) -> Result<bool, TlsError> {
    let exists = |path: &PathBuf| match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(TlsError::Read { path: path.clone(), source }),
    };
    let half = |there: &PathBuf, missing: &PathBuf| {
        Err(TlsError::HalfMissing { there: there.clone(), missing: missing.clone() })
    };
    match (exists(&tls.certificate)?, exists(&tls.private_key)?) {
        (true, false) => half(&tls.certificate, &tls.private_key),
        (false, true) => half(&tls.private_key, &tls.certificate),
        (both, _) => Ok(both),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read { path: path.into(), source })
}

fn holds(text: &[u8], line: &str) -> bool {
    text.windows(line.len()).any(|window| window == line.as_bytes())
}

/// At least one certificate, in the file's order.
fn certificates_in(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<_, _>>()
        .map_err(|source| TlsError::Damaged { path: path.into(), source })?;
    if certificates.is_empty() {
        let hint = if holds(&text, "PRIVATE KEY-----") { Hint::Swapped } else { Hint::Nothing };
        return Err(TlsError::Absent { path: path.into(), expected: Section::Certificate, hint });
    }
    Ok(certificates)
}

fn key_in(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        let hint = if holds(&text, "ENCRYPTED") {
            Hint::Encrypted
        } else if holds(&text, "BEGIN CERTIFICATE-----") {
            Hint::Swapped
        } else {
            Hint::Nothing
        };
        match error {
            // The older form of an encrypted key fails on the header that says so.
            source if hint != Hint::Encrypted && !matches!(source, pem::Error::NoItemsFound) => {
                TlsError::Damaged { path: path.into(), source }
            }
            _ => TlsError::Absent { path: path.into(), expected: Section::Key, hint },
        }
    })
}

/// What there is to say about the certificate in `path`, and whether it may be served at `now`.
fn describe(der: &CertificateDer<'_>, path: &Path, now: Timestamp) -> Result<Certificate, TlsError> {
    let (_, leaf) =
        X509Certificate::from_der(der).map_err(|source| TlsError::Malformed { path: path.into(), source })?;
    let not_before = timestamp(leaf.validity().not_before);
    let not_after = timestamp(leaf.validity().not_after);
    let development =
        leaf.issuer().iter_common_name().any(|name| name.as_str() == Ok(development::AUTHORITY));
    if now > not_after {
        return Err(TlsError::Expired { path: path.into(), at: not_after, development });
    }
    if now < not_before {
        return Err(TlsError::NotYetValid { path: path.into(), from: not_before });
    }
    Ok(Certificate { names: names(&leaf), not_after, development })
}

/// "No end", which certificates write as the last second of the year 9999, is a few hours more than a timestamp holds.
fn timestamp(time: ASN1Time) -> Timestamp {
    let limit = if time.timestamp() < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::from_second(time.timestamp()).unwrap_or(limit)
}

fn names(leaf: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = leaf.subject_alternative_name() else { return Vec::new() };
    let name = |general: &GeneralName<'_>| match general {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
        _ => None,
    };
    extension.value.general_names.iter().filter_map(name).collect()
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use std::{error::Error, os::unix::fs::PermissionsExt};

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};
    use rustls::{
        ClientConfig, ClientConnection, ProtocolVersion, ServerConnection, SupportedProtocolVersion,
    };
    use tempfile::TempDir;

    use super::{client::roots_in, *};

    fn pair(folder: &TempDir) -> config::Tls {
        config::Tls {
            certificate: folder.path().join("certs/server.crt"),
            private_key: folder.path().join("certs/server.key"),
            client_ca_file: None,
        }
    }

    /// Writes a pair that is valid in these years.
    fn issued(folder: &TempDir, years: [i32; 2]) -> config::Tls {
        let tls = pair(folder);
        let mut params = CertificateParams::new(["api.example".to_owned(), "192.0.2.1".to_owned()]).unwrap();
        [params.not_before, params.not_after] = years.map(|year| date_time_ymd(year, 12, 31));
        let key = KeyPair::generate().unwrap();
        fs::create_dir_all(folder.path().join("certs")).unwrap();
        fs::write(&tls.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(&tls.private_key, key.serialize_pem()).unwrap();
        tls
    }

    fn refusal(tls: &config::Tls) -> TlsError {
        server_config(tls).expect_err("the pair must be refused")
    }

    #[test]
    fn a_development_certificate_is_made_once() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        let (_, made) = server_config(&tls).unwrap();
        assert_eq!(made.names, ["localhost", "127.0.0.1", "::1"]);
        assert!(made.development);
        let days = made.expires_in(Timestamp::now()).as_secs_f64() / 86_400.0;
        assert!((823.9..=824.0).contains(&days), "{days}");
        assert_eq!(tls.private_key.metadata().unwrap().permissions().mode() & 0o777, 0o600);

        let files = [&tls.certificate, &tls.private_key].map(|path| fs::read(path).unwrap());
        let (_, again) = server_config(&tls).unwrap();
        assert_eq!(again, made);
        assert_eq!([&tls.certificate, &tls.private_key].map(|path| fs::read(path).unwrap()), files);
    }

    #[test]
    fn the_key_of_the_development_ca_is_nowhere() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        server_config(&tls).unwrap();
        let files: Vec<_> =
            fs::read_dir(folder.path().join("certs")).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 2, "{files:?}");
        let keys: Vec<_> = PrivateKeyDer::pem_slice_iter(&fs::read(&tls.private_key).unwrap()).collect();
        assert_eq!(keys.len(), 1);
        assert!(!holds(&fs::read(&tls.certificate).unwrap(), "PRIVATE KEY"));

        let chain = certificates_in(&tls.certificate).unwrap();
        let public = |der| X509Certificate::from_der(der).unwrap().1.public_key().raw.to_vec();
        assert_eq!(chain.len(), 2);
        let key = KeyPair::from_pem(&fs::read_to_string(&tls.private_key).unwrap()).unwrap();
        let (leaf, authority) = (public(&chain[0]), public(&chain[1]));
        assert_ne!(leaf, authority);
        assert!(leaf.ends_with(key.public_key_raw()) && !authority.ends_with(key.public_key_raw()));
    }

    #[test]
    fn both_names_may_have_no_folder_in_common_and_one_may_be_made() {
        let folder = TempDir::new().unwrap();
        let tls = config::Tls {
            certificate: folder.path().join("public/a.crt"),
            private_key: folder.path().join("private/deep/a.key"),
            client_ca_file: None,
        };
        assert!(server_config(&tls).is_ok());
    }

    #[test]
    fn starts_in_the_same_instant_agree_on_one_pair() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        std::thread::scope(|scope| {
            let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| server_config(&tls).unwrap().1)).collect();
            let mut made = starts.into_iter().map(|start| start.join().unwrap());
            let first = made.next().unwrap();
            assert!(made.all(|other| other == first));
        });
    }

    #[test]
    fn a_folder_that_cant_be_written_is_named() {
        let folder = TempDir::new().unwrap();
        // No user may make a folder there, not even root.
        let tls = config::Tls {
            certificate: "/proc/certs/a.crt".into(),
            private_key: "/proc/certs/a.key".into(),
            client_ca_file: None,
        };
        let text = refusal(&tls).to_string();
        assert!(text.contains("into /proc/certs: make the folder writable"), "{text}");

        // What is behind a file can't even be looked for.
        fs::write(folder.path().join("certs"), "").unwrap();
        assert!(matches!(refusal(&pair(&folder)), TlsError::Read { .. }));
    }

    #[test]
    fn a_given_pair_is_served() {
        let folder = TempDir::new().unwrap();
        let (config, certificate) = server_config(&issued(&folder, [2020, 9999])).unwrap();
        assert_eq!(certificate.names, ["api.example", "192.0.2.1"]);
        assert!(!certificate.development);
        assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
        assert_eq!(config.max_early_data_size, 0);
    }

    #[test]
    fn the_year_9999_is_no_error() {
        let time = ASN1Time::from_timestamp(253_402_300_799).unwrap();
        assert_eq!(timestamp(time), Timestamp::MAX);
    }

    #[test]
    fn one_file_alone_is_refused_by_name() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        fs::rename(&tls.private_key, folder.path().join("elsewhere")).unwrap();
        let text = refusal(&tls).to_string();
        assert!(text.contains("server.crt is there but") && text.contains("server.key is not"), "{text}");

        fs::rename(folder.path().join("elsewhere"), &tls.private_key).unwrap();
        fs::remove_file(&tls.certificate).unwrap();
        let text = refusal(&tls).to_string();
        assert!(text.contains("server.key is there but") && text.contains("server.crt is not"), "{text}");
        assert!(!tls.certificate.exists());
    }

    #[test]
    fn a_link_to_nowhere_makes_no_development_certificate() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        fs::create_dir(folder.path().join("certs")).unwrap();
        for path in [&tls.certificate, &tls.private_key] {
            std::os::unix::fs::symlink("/nowhere/at/all", path).unwrap();
        }
        assert!(matches!(refusal(&tls), TlsError::Read { path, .. } if path == tls.certificate));
    }

    #[test]
    fn garbage_is_told_from_damage() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        let good = [&tls.certificate, &tls.private_key].map(|path| fs::read_to_string(path).unwrap());

        for garbage in [&b""[..], b"hello", &[0x30, 0x82, 0xff]] {
            fs::write(&tls.certificate, garbage).unwrap();
            assert!(matches!(
                refusal(&tls),
                TlsError::Absent { expected: Section::Certificate, hint: Hint::Nothing, .. }
            ));
        }
        fs::write(&tls.certificate, &good[0][..good[0].len() / 2]).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Damaged { path, .. } if path == tls.certificate));
        fs::write(&tls.certificate, "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n")
            .unwrap();
        assert!(matches!(refusal(&tls), TlsError::Malformed { path, .. } if path == tls.certificate));

        fs::write(&tls.certificate, &good[0]).unwrap();
        fs::write(&tls.private_key, "hello").unwrap();
        assert!(matches!(
            refusal(&tls),
            TlsError::Absent { expected: Section::Key, hint: Hint::Nothing, .. }
        ));
        fs::write(&tls.private_key, &good[1][..good[1].len() / 2]).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Damaged { path, .. } if path == tls.private_key));
        fs::write(&tls.private_key, "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n")
            .unwrap();
        assert!(matches!(refusal(&tls), TlsError::Unsuitable { path, .. } if path == tls.private_key));
    }

    #[test]
    fn swapped_and_encrypted_files_are_recognised() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        let swapped = config::Tls {
            certificate: tls.private_key.clone(),
            private_key: tls.certificate.clone(),
            client_ca_file: None,
        };
        assert!(refusal(&swapped).to_string().contains("swapped"));
        fs::copy(&tls.certificate, &tls.private_key).unwrap();
        assert!(refusal(&tls).to_string().contains("swapped"));

        for text in [
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\naGVsbG8=\n-----END ENCRYPTED PRIVATE KEY-----\n",
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00\n\naGVsbG8=\n-----END RSA PRIVATE KEY-----\n",
        ] {
            fs::write(&tls.private_key, text).unwrap();
            let error = refusal(&tls).to_string();
            assert!(error.contains("openssl pkey"), "{error}");
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let folder = TempDir::new().unwrap();
        let tls = issued(&folder, [2020, 2100]);
        fs::write(&tls.private_key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        assert!(matches!(refusal(&tls), TlsError::Mismatch { .. }));
    }

    #[test]
    fn a_certificate_out_of_its_time_is_refused_with_the_date() {
        let folder = TempDir::new().unwrap();
        let text = refusal(&issued(&folder, [2020, 2021])).to_string();
        assert!(text.contains("expired at 2021-12-31T00:00:00Z: renew it"), "{text}");
        assert!(!text.contains("development"), "{text}");
        let text = refusal(&issued(&folder, [2100, 2101])).to_string();
        assert!(text.contains("not valid before 2100-12-31T00:00:00Z"), "{text}");
    }

    #[test]
    fn an_expired_development_certificate_says_how_to_get_a_new_one() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        server_config(&tls).unwrap();
        let leaf = &certificates_in(&tls.certificate).unwrap()[0];
        let later = Timestamp::now() + Duration::from_secs(825 * 86_400);
        let error = describe(leaf, &tls.certificate, later).expect_err("825 days are over");
        assert!(error.to_string().contains("remove it and its key"), "{error}");
    }

    #[test]
    fn the_rest_of_a_life_never_is_negative() {
        let not_after: Timestamp = "2030-01-08T00:00:00Z".parse().unwrap();
        let certificate = Certificate { names: Vec::new(), not_after, development: false };
        assert_eq!(
            certificate.expires_in("2030-01-01T00:00:00Z".parse().unwrap()),
            Duration::from_secs(7 * 86_400)
        );
        assert_eq!(certificate.expires_in("2031-01-01T00:00:00Z".parse().unwrap()), Duration::ZERO);
    }

    /// The two ends talk in memory until both have what they need.
    fn shake_hands(
        client: ClientConfig,
        server: Arc<ServerConfig>,
        name: &'static str,
    ) -> Result<ClientConnection, rustls::Error> {
        let mut client = ClientConnection::new(Arc::new(client), name.try_into().unwrap())?;
        let mut server = ServerConnection::new(server)?;
        while client.is_handshaking() || server.is_handshaking() {
            let mut wire = Vec::new();
            client.write_tls(&mut wire).unwrap();
            server.read_tls(&mut wire.as_slice()).unwrap();
            server.process_new_packets()?;
            wire.clear();
            server.write_tls(&mut wire).unwrap();
            client.read_tls(&mut wire.as_slice()).unwrap();
            client.process_new_packets()?;
        }
        Ok(client)
    }

    fn client(ca_file: &Path, version: &'static SupportedProtocolVersion) -> ClientConfig {
        ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots_in(ca_file).unwrap())
            .with_no_client_auth()
    }

    #[test]
    fn a_client_that_trusts_only_the_one_file_connects() {
        let folder = TempDir::new().unwrap();
        let tls = pair(&folder);
        let (server, _) = server_config(&tls).unwrap();
        for (version, number) in [(&TLS13, ProtocolVersion::TLSv1_3), (&TLS12, ProtocolVersion::TLSv1_2)] {
            for name in development::NAMES {
                let mut config = client(&tls.certificate, version);
                config.alpn_protocols = vec![b"http/1.1".into(), b"h2".into()];
                let connection = shake_hands(config, server.clone(), name).unwrap();
                assert_eq!(connection.protocol_version(), Some(number));
                assert_eq!(connection.alpn_protocol(), Some(&b"h2"[..]));
            }
        }
        assert!(shake_hands(client(&tls.certificate, &TLS13), server, "example.com").is_err());
    }

    fn trusting(ca_file: PathBuf) -> config::Connection {
        config::Connection { ca_file: Some(ca_file), ..config::Connection::default() }
    }

    #[test]
    fn an_upstream_is_offered_http2_only_where_that_is_asked_for() {
        let folder = TempDir::new().unwrap();
        let (server, _) = server_config(&pair(&folder)).unwrap();
        for (http2, chosen) in [(true, &b"h2"[..]), (false, b"http/1.1")] {
            let connection = config::Connection { http2, ..trusting(pair(&folder).certificate) };
            let client = ClientConfig::clone(&upstream_config(&connection).unwrap());
            let connected = shake_hands(client, server.clone(), "localhost").unwrap();
            assert_eq!(connected.alpn_protocol(), Some(chosen));
        }
    }

    #[test]
    fn an_upstream_is_judged_by_its_ca_file_alone() {
        let [own, other] = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let (server, _) = server_config(&pair(&own)).unwrap();
        server_config(&pair(&other)).unwrap();
        let to_upstream =
            |folder| ClientConfig::clone(&upstream_config(&trusting(pair(folder).certificate)).unwrap());
        let connection = shake_hands(to_upstream(&own), server.clone(), "localhost").unwrap();
        assert_eq!(connection.alpn_protocol(), Some(&b"http/1.1"[..]));
        assert!(shake_hands(to_upstream(&other), server, "localhost").is_err());
    }

    #[test]
    fn a_ca_file_without_certificates_is_refused() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("roots.pem");
        let error = upstream_config(&trusting(path.clone())).expect_err("there is no file");
        assert!(matches!(&error, TlsError::Read { .. }));
        assert!(error.source().is_some());
        fs::write(&path, "").unwrap();
        assert!(matches!(upstream_config(&trusting(path)), Err(TlsError::Absent { .. })));
    }
}
